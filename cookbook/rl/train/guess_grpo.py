"""Train a small transformer to search: multi-turn GRPO on a CPU, from a random start, in minutes.

The env hides a number from 0 to 6. Each turn the model calls `guess(number)` and is answered
`higher`, `lower` or `right`. It has three turns, just enough to halve what is left each time. A
turn without the right guess costs 0.1 and the right guess earns 1, so the best policy has a mean
return of 0.857; guesses at random have 0.15.

`MultiTurnRollout` plays the episodes with a sampler in this process and returns token ids, labels
and log probabilities. The update is the clipped policy gradient, and the advantage of a turn is
what was earned from it on, relative to the same turn of the group (the samples of one hidden
number). One episode in twenty loses its env: such a trajectory has no reward (`None`), and it takes
part in no mean.

    pip install torch matplotlib twinkle-rollout
    python guess_grpo.py --out runs/guess          # three seeds, a plot, rewards.json
    python guess_grpo.py --seeds 0 --steps 30 --at-least 0.35   # a short run

Source of the objective: Shao et al. 2024, "DeepSeekMath", eq. 3, without its KL term.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from twinkle_agentic.envs import Env, StepResult
from twinkle_agentic.envs.errors import SandboxLostError
from twinkle_agentic.rollout import MultiTurnRollout, TokenTrajectory

NUMBERS = 7
TURNS = 3
BEST_RETURN = 1 - 0.1 * (1 * 2 + 2 * 4) / NUMBERS  # halving finds 1, 2 and 4 numbers a turn
FAULT_RATE = 0.05

GROUP_SIZE = 32
GROUPS = 7  # one for each number
EPOCHS = 4
LEARNING_RATE = 5e-4
CLIP = 0.2
SCALE = 0.5  # of returns, for advantages of about 1
ENTROPY_START = 0.15  # falls to 0 over the run; less, and a seed settles for two good turns


# The env


class GuessEnv(Env):
    """Find the hidden number. `user_data["number"]` hides it, the same one for a whole group."""

    def __init__(self, *, faulty: bool) -> None:
        self._number = 0
        self._guesses = 0
        self._found = False
        self._faulty = faulty  # stands for a sandbox that dies: an infrastructure failure

    def tools(self) -> list[Any]:
        parameters = {
            "type": "object",
            "properties": {"number": {"type": "integer"}},
            "required": ["number"],
        }
        function = {"name": "guess", "description": "Guess.", "parameters": parameters}
        return [{"type": "function", "function": function}]

    def reset(self, trajectory: Any = None) -> StepResult:
        self._number = int(trajectory["user_data"]["number"])
        self._guesses, self._found = 0, False
        return StepResult()

    def step(self, tool_name: str, arguments: dict[str, Any]) -> StepResult:
        if self._faulty:
            raise SandboxLostError("the sandbox was lost (injected)")
        guess = arguments["number"]
        self._guesses += 1
        self._found = guess == self._number
        if self._found:
            return StepResult("right", reward=1.0, done=True)
        return StepResult("higher" if self._number > guess else "lower", reward=-0.1)

    def evaluate(self, trajectories: Sequence[Any], **kwargs: Any) -> list[float]:
        """Let the turns that were not used cost as much as wrong guesses, or silence would pay."""
        return [0.0 if self._found else -0.1 * (TURNS - self._guesses)]


# The tokens: one word, one token


class WordTokenizer:
    """Splits at blanks. The vocabulary is all that is ever said in the game."""

    eos_token = "<end>"
    words = (
        "<pad>",
        "<end>",
        "<user>",
        "<assistant>",
        "<tool>",
        "find",
        "higher",
        "lower",
        "right",
    )

    def __init__(self) -> None:
        self.vocabulary = [*self.words, *map(str, range(NUMBERS))]
        self.ids = {word: number for number, word in enumerate(self.vocabulary)}
        self.eos_token_id = self.ids[self.eos_token]

    def apply_chat_template(self, conversation: list[Any], **options: Any) -> str:
        turns = [f"<{message['role']}> {message['content']} <end> " for message in conversation]
        return "".join(turns) + ("<assistant> " if options["add_generation_prompt"] else "")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [self.ids[word] for word in text.split()]

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self.vocabulary[number] for number in ids)


class GameTemplate:
    """Turns messages into tokens, and a sampled number into a call of `guess`."""

    truncation_strategy = "raise"

    def __init__(self, tokenizer: WordTokenizer) -> None:
        self.tokenizer = tokenizer

    def encode(self, trajectory: Any, add_generation_prompt: bool = False) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            trajectory["messages"], add_generation_prompt=add_generation_prompt
        )
        ids = self.tokenizer.encode(text)
        return {
            "input_ids": ids,
            "labels": [-100] * len(ids),
            "messages": list(trajectory["messages"]),
        }

    def concat_input_feature(self, feature: Mapping[str, Any], tokens: list[int]) -> dict[str, Any]:
        ids = [*feature["input_ids"], *tokens]
        # Shifted by one: labels[i] is the target of input_ids[i].
        in_order = [*feature["labels"][-1:], *feature["labels"][:-1], *tokens]
        labels = [*in_order[1:], in_order[0]]
        text = self.tokenizer.decode([token for token in tokens if token != self._end])
        message = {"role": "assistant", "content": text}
        return {**feature, "input_ids": ids, "labels": labels,
                "messages": [*feature["messages"], message]}  # fmt: skip

    def parse_tool_call(self, decoded: str) -> list[Any]:
        words = decoded.split()
        if len(words) != 1 or not words[0].isdigit():
            return []
        arguments = json.dumps({"number": int(words[0])})
        return [{"type": "function", "function": {"name": "guess", "arguments": arguments}}]

    @property
    def _end(self) -> int:
        return self.tokenizer.eos_token_id


# The model


class Transformer(nn.Module):
    """A decoder of about two million parameters."""

    def __init__(self, vocabulary: int, *, width: int = 192, layers: int = 4, length: int = 64):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids_B_T: Tensor) -> Tensor:
        """Return logits, `[B, T, vocabulary]`."""
        length = ids_B_T.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.tokens(ids_B_T) + self.places(torch.arange(length))
        return self.head(self.norm(self.blocks(hidden, mask=mask, is_causal=True)))


@dataclass
class Sequence_:
    """One sampled turn, as `MultiTurnRollout` reads it."""

    tokens: list[int]
    logprobs: list[float]
    decoded: str
    stop_reason: str
    new_input_feature: None = None


@dataclass
class Response:
    """The answer to one input."""

    sequences: list[Sequence_]


class Sampler:
    """Samples a turn, which is one token, for each input of a batch."""

    def __init__(self, model: Transformer, tokenizer: WordTokenizer) -> None:
        self.model, self.tokenizer = model, tokenizer

    @torch.no_grad()
    def sample(self, inputs: list[Any], sampling_params: Any = None) -> list[Response]:
        rows = [one["input_ids"] for one in inputs]
        longest = max(map(len, rows))
        padded = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        every, last = torch.arange(len(rows)), torch.tensor([len(row) - 1 for row in rows])
        logprobs = functional.log_softmax(self.model(padded)[every, last], dim=-1)
        chosen = torch.multinomial(logprobs.exp(), 1)[:, 0]
        return [
            Response([Sequence_([token], [value], self.tokenizer.decode([token]), "stop")])
            for token, value in zip(chosen.tolist(), logprobs[every, chosen].tolist(), strict=True)
        ]


# Training


def returns_to_go(one: TokenTrajectory) -> list[float] | None:
    """Return, for each turn, what was earned from it to the end; `None` without a reward.

    A turn is one sampled token here, so this is one number for each label that is learnt.
    """
    if one["reward"] is None:
        return None
    rewards = [*one["step_rewards"], *[0.0] * (one["turns"] - len(one["step_rewards"]))]
    rewards[-1] += one["eval_reward"] or 0.0
    return [sum(rewards[turn:]) for turn in range(len(rewards))]


def advantages_of(group: Sequence[TokenTrajectory]) -> list[list[float] | None]:
    """Return the advantage of each turn relative to the same turn of the group.

    A trajectory that the infrastructure lost says nothing of the policy: it has no advantages, and
    it counts in no mean. The advantages are not divided by the spread of the group, which would
    give most weight to the numbers that are found already (Liu et al. 2025, "Understanding R1-Zero-
    Like Training").
    """
    returns = [returns_to_go(one) for one in group]
    scored = [one for one in returns if one is not None]
    if len(scored) < 2:
        return [None] * len(group)
    columns = [[one[turn] for one in scored if len(one) > turn] for turn in range(TURNS)]
    means = [sum(column) / len(column) if column else 0.0 for column in columns]
    return [
        None
        if one is None
        else [(value - mean) / SCALE for value, mean in zip(one, means, strict=False)]
        for one in returns
    ]


def update(
    model: Transformer,
    optimizer: torch.optim.Optimizer,
    finished: Sequence[TokenTrajectory],
    advantages: Sequence[list[float] | None],
    *,
    entropy_weight: float,
) -> None:
    """Take one step of the clipped policy gradient over the sampled tokens."""
    used = [
        (one, advantage)
        for one, advantage in zip(finished, advantages, strict=True)
        if advantage is not None
    ]
    longest = max(len(one["input_ids"]) for one, _ in used)

    def padded(rows: list[list[int]], fill: int) -> Tensor:
        return torch.tensor([row + [fill] * (longest - len(row)) for row in rows])

    ids_B_T = padded([one["input_ids"] for one, _ in used], 0)
    labels_B_T = padded([one["labels"] for one, _ in used], -100)
    mask_B_T = labels_B_T != -100
    old_N = torch.tensor([value for one, _ in used for value in one["logprobs"] or ()])
    advantage_N = torch.tensor([value for _, advantage in used for value in advantage])

    logprobs_N_V = functional.log_softmax(model(ids_B_T)[mask_B_T], dim=-1)
    new_N = logprobs_N_V.gather(1, labels_B_T[mask_B_T][:, None])[:, 0]
    ratio_N = (new_N - old_N).exp()
    gain_N = torch.minimum(ratio_N * advantage_N, ratio_N.clamp(1 - CLIP, 1 + CLIP) * advantage_N)
    entropy_N = -(logprobs_N_V.exp() * logprobs_N_V).sum(-1)
    loss = -(gain_N + entropy_weight * entropy_N).mean()
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def train(seed: int, steps: int) -> list[float]:
    """Train one model; return the mean reward of the scored trajectories of each step."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)  # the matrices are small
    rng = random.Random(seed)
    tokenizer = WordTokenizer()
    model = Transformer(len(tokenizer.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    rollout = MultiTurnRollout(
        Sampler(model, tokenizer),
        GameTemplate(tokenizer),
        env_factory=lambda trajectory: GuessEnv(faulty=rng.random() < FAULT_RATE),
        max_turns=TURNS,
    )
    rewards: list[float] = []
    for step in range(steps):
        numbers = rng.sample(range(NUMBERS), GROUPS)
        prompts = [
            {"messages": [{"role": "user", "content": "find"}], "user_data": {"number": number}}
            for number in numbers
            for _ in range(GROUP_SIZE)
        ]
        finished = rollout(prompts)
        advantages: list[list[float] | None] = []
        for start in range(0, len(finished), GROUP_SIZE):
            advantages += advantages_of(finished[start : start + GROUP_SIZE])
        weight = ENTROPY_START * (1 - step / steps)
        for _ in range(EPOCHS):
            update(model, optimizer, finished, advantages, entropy_weight=weight)
        scored = [one["reward"] for one in finished if one["reward"] is not None]
        rewards.append(sum(scored) / len(scored))
        if step % 10 == 0 or step == steps - 1:
            lost = len(finished) - len(scored)
            print(f"seed {seed} step {step:4d} reward {rewards[-1]:+.3f} ({lost} without)")
    return rewards


def plot(curves: Mapping[int, Sequence[float]], path: Path) -> None:
    """Draw the mean of the seeds with the band from the lowest to the highest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = list(zip(*curves.values(), strict=True))
    steps = range(len(columns))
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.fill_between(steps, [min(c) for c in columns], [max(c) for c in columns], alpha=0.25)
    axes.plot(steps, [sum(c) / len(c) for c in columns], label=f"mean of {len(curves)} seeds")
    axes.axhline(BEST_RETURN, linestyle="--", color="gray", label="best possible")
    axes.axhline(0.8 * BEST_RETURN, linestyle=":", color="gray", label="80 % of it")
    axes.set_xlabel("update")
    axes.set_ylabel("mean return")
    axes.legend(loc="lower right")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    """Train each seed; return 0 where all of them reach `--at-least`."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=80, help="updates for each seed")
    parser.add_argument("--out", type=Path, default=Path("runs/guess"))
    parser.add_argument(
        "--at-least",
        type=float,
        default=0.8 * BEST_RETURN,
        help="mean reward of the last ten updates that each seed must reach (default: 80 %% of "
        "the best possible)",
    )
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    curves = {seed: train(seed, options.steps) for seed in options.seeds}
    (options.out / "rewards.json").write_text(json.dumps(curves))
    if len(curves) > 1:
        plot(curves, options.out / "rewards.png")
    ends = {seed: sum(curve[-10:]) / len(curve[-10:]) for seed, curve in curves.items()}
    for seed, end in ends.items():
        share = end / BEST_RETURN
        print(f"seed {seed}: {curves[seed][0]:+.3f} -> {end:+.3f}, {share:.0%} of the best")
    print(f"{time.monotonic() - started:.0f} s, best possible {BEST_RETURN:.3f}")
    return 0 if all(end >= options.at_least for end in ends.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
