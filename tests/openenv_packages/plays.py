"""How each package is played: moves, what must be set, and what its text must tell a model.

`LEGAL` stands for the first of the moves that the latest observation lists.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LEGAL = "$legal"


@dataclass(frozen=True, kw_only=True)
class Play:
    """A scripted episode.

    Attributes:
        moves: Arguments of the one tool, or `(tool, arguments)`, in order.
        illegal: A move that the environment does not allow.
        env_kwargs: Of the constructor, in process.
        environ: Of the server and of the process.
        reset_kwargs: Of each reset.
        install: What it needs and does not require.
        leave_out: What it requires and is not installed: large, and of no use here.
        varies: It draws by its own random numbers, so only the names in the texts are compared.
        tells: Patterns that the first text must have: what it is, whose turn, which moves.
        needs: What it takes to run, beyond the installation.
    """

    moves: tuple[Any, ...] = ()
    illegal: Any = None
    env_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    reset_kwargs: Mapping[str, Any] = field(default_factory=dict[str, Any])
    install: tuple[str, ...] = ()
    leave_out: tuple[str, ...] = ()
    varies: bool = False
    tells: Mapping[str, str] = field(default_factory=dict[str, str])
    needs: str = ""


_ECHO = ("echo_message", {"message": "hello"})
# Of the default maze: 0 up, 1 down, 2 left, 3 right.
_WAY_OUT = (3, 3, 1, 1, 2, 2, 1, 1, 3, 1, 1, 3, 3, 1, 3, 3, 3, 3)

PLAYS: dict[str, Play] = {
    "agent_world_model_env": Play(needs="a scenario: its data set"),
    "atari_env": Play(
        tells={"game": r"game_name: pong", "moves": r"action_meanings: .*LEFT"},
        moves=({"action_id": 0},) * 3,
        illegal={"action_id": 99},
    ),
    "browsergym_env": Play(needs="a browser and a MiniWoB++ server"),
    "calendar_env": Play(
        moves=({"action_type": "ListToolsAction"},),
        needs="its own client: the server has no `/ws`",
    ),
    "carla_env": Play(
        tells={"game": r"scene_description:", "moves": r"action_type \(one of "},
        moves=(
            {"action_type": "brake_vehicle", "brake_intensity": 1.0},
            {"action_type": "observe"},
        ),
        illegal={"action_type": "fly"},
    ),
    "chat_env": Play(needs="a tokenizer"),
    "chess_env": Play(
        tells={
            "game": r"Environment: chess",
            "turn": r"fen: \S+ [wb] ",
            "moves": r"legal_moves: \w+",
        },
        moves=({"move": LEGAL},) * 3,
        illegal={"move": "a1a8"},
        varies=True,
    ),
    "coding_env": Play(
        tells={"game": r"Environment: coding", "moves": r"call run_python"},
        moves=({"code": "x = 6 * 7"}, {"code": "print(x)"}),
        illegal={"code": "print(undefined)"},
    ),
    "connect4_env": Play(
        tells={
            "game": r"Environment: connect4",
            "turn": r"next_player: 1",
            "moves": r"legal_actions: \[0, 1",
        },
        moves=tuple({"column": column} for column in (0, 1, 0, 1, 0, 1, 0)),
        illegal={"column": 9},
    ),
    "dipg_safety_env": Play(needs="21 constructor arguments: its data set"),
    "dm_control_env": Play(
        moves=({"values": [0.5]}, {"values": [-0.5]}),
        illegal={"values": ["left"]},
        install=("mujoco<4",),  # dm_control 1.0.50 fails with what it allows, 4.0
        varies=True,
    ),
    "echo_env": Play(moves=(_ECHO, _ECHO), illegal=("echo_message", {"text": "hello"})),
    "finqa_env": Play(needs="its data set"),
    "finrl_env": Play(needs="stock data, and packages that cannot be installed together"),
    "git_env": Play(needs="a Gitea server"),
    "grid_world_env": Play(
        tells={"game": r"Environment: grid world", "moves": r"one of UP, DOWN, LEFT"},
        moves=({"action": "DOWN"},) * 4 + ({"action": "RIGHT"},) * 4,
        illegal={"action": "NORTHWEST"},
    ),
    "julia_env": Play(moves=({"core_code": "println(1)"},), needs="`julia`"),
    "kernrl": Play(
        moves=({"code": "print(1)"},),
        leave_out=("torch", "triton"),
        varies=True,
        needs="torch and a GPU, to run a kernel",
    ),
    "maze_env": Play(moves=tuple({"action": action} for action in _WAY_OUT), illegal={"action": 9}),
    "openapp_env": Play(needs="a browser and OpenApps"),
    "openspiel_env": Play(
        moves=({"action_id": LEGAL},) * 12,
        illegal={"action_id": 77},
        install=("open_spiel",),
        varies=True,
    ),
    "reasoning_gym_env": Play(moves=({"answer": "4"},), illegal={"reply": "4"}),
    "repl_env": Play(
        moves=({"code": "x = 6 * 7\nprint(x)"}, {"is_final": True, "final_answer": "42"}),
        illegal={"code": "print(undefined)"},
        reset_kwargs={"context": "six times seven", "task_prompt": "Multiply."},
        varies=True,  # the order of the names of a set
        tells={"game": "(?s)Environment: repl.*Task: Multiply", "moves": r"code \(string"},
    ),
    "snake_env": Play(
        moves=({"action": 0},) * 12,
        illegal={"action": 7},
        varies=True,
        tells={"game": "Environment: snake", "moves": "1 = turn left"},
    ),
    "sumo_rl_env": Play(needs="SUMO, a net file and a route file"),
    "tbench2_env": Play(needs="its tasks, from GitHub"),
    "textarena_env": Play(
        moves=({"message": "[4]"}, {"message": "[2]"}, {"message": "[7]"}),
        illegal={"message": "I will not say a number"},
        env_kwargs={"env_id": "GuessTheNumber-v0", "download_nltk": False},
        tells={
            "game": "Guess The Number",
            "turn": "current_player_id: 0",
            "moves": "between 1 and 20",
        },
        environ={"TEXTARENA_ENV_ID": "GuessTheNumber-v0", "TEXTARENA_DOWNLOAD_NLTK": "0"},
        varies=True,
    ),
    "unity_env": Play(
        leave_out=("mlagents-envs",), needs="ml-agents from git, and Unity's binaries"
    ),
    "websearch_env": Play(
        moves=({"query": "reinforcement learning"},),
        illegal={"question": "?"},
        varies=True,  # the error without a network names an address in memory
        needs="`SERPER_API_KEY` and a network, to find something",
    ),
    "wildfire_env": Play(
        moves=({"action": "water", "x": 1, "y": 1}, {"action": "break", "x": 2, "y": 2})
        + ({"action": "wait"},) * 4,
        illegal={"action": "pray"},
        tells={"game": "Environment: wildfire", "moves": '"break" .*"water" .*"wait"'},
        env_kwargs={"width": 8, "height": 8},
        environ={"WILDFIRE_WIDTH": "8", "WILDFIRE_HEIGHT": "8"},
    ),
}
