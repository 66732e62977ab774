"""Try the environment packages of a checkout of OpenEnv, and write docs/openenv-packages.md.

Each package gets an environment of its own, its server a process. It is played in process, by the
client in its environment, and by the client in this one, where the package is not installed. uv
must find a Python 3.12, which grid_world_env requires.

Run: nox -s openenv-packages -- path/to/OpenEnv [package ...] [--work FOLDER] [--wanted a,b]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import itertools
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from plays import PLAYS, Play

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
OURS = ("twinkle-tools", "twinkle-envs-core", "twinkle-envs-openenv")
INSTALL_S, PROBE_S, SERVER_S = 600, 600, 300

# `openenv` is what `openenv-core` was called before, and both have the same modules.
OVERRIDES = "openenv[core]==0.10.0\nopenenv-core; python_version < '3'\n"


# What differs from machine to machine: folders, ports.
_PATH = re.compile(r" ?\(?(?<![\w.`])/[\w.-]+/\S+|(?<=127\.0\.0\.1):\d+")
_bases = threading.Lock()
_fresh: set[Path] = set()


@dataclasses.dataclass
class Row:
    """What was seen of one package."""

    name: str
    installed: str = ""
    server: str = ""
    embedded: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    with_package: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    without: dict[str, Any] = dataclasses.field(default_factory=dict[str, Any])

    @property
    def wrong(self) -> list[str]:
        """What differs between the three ways, and what the first text does not tell."""
        return _wrong(self, PLAYS.get(self.name, Play()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("packages", nargs="*", help="only these; the table, with --work, of all")
    parser.add_argument("--work", type=Path, help="keep environments and results here")
    parser.add_argument("--commit", help="of a checkout without git")
    parser.add_argument("--wanted", default="", help="a,b: for the page to say which are missing")
    parser.add_argument("--jobs", type=int, default=2, help="packages at a time")
    asked = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ.pop("VIRTUAL_ENV", None)
    work = asked.work or Path(tempfile.mkdtemp(prefix="openenv-packages-"))
    names = sorted(file.parent.name for file in asked.checkout.glob("envs/*/pyproject.toml"))
    folders = [asked.checkout / "envs" / n for n in names if n in (asked.packages or names)]
    (work / "empty").mkdir(parents=True, exist_ok=True)
    (work / "overrides.txt").write_text(OVERRIDES)
    try:
        with ThreadPoolExecutor(asked.jobs) as pool:
            for row in pool.map(_try, folders, itertools.repeat(work.resolve())):
                print(_line(row), *row.wrong, sep="\n  ", flush=True)
        files = [work / f"{name}.json" for name in names]
        rows = [Row(**json.loads(file.read_text())) for file in files if file.is_file()]
    finally:
        if asked.work is None:
            shutil.rmtree(work, ignore_errors=True)
    if len(rows) == len(names):
        commit = asked.commit or _git(asked.checkout, "rev-parse", "HEAD")
        missing = [n for n in asked.wanted.split(",") if n and not {n, f"{n}_env"} & {*names}]
        (ROOT / "docs/openenv-packages.md").write_text(_page(rows, commit, missing))
    wrong = [f"{row.name}: {each}" for row in rows for each in row.wrong]
    if wrong:
        sys.exit("\n".join(["", "differences:", *wrong]))


def _try(folder: Path, work: Path) -> Row:
    row = Row(folder.name)
    source = work / "src" / folder.name
    shutil.copytree(folder, source, dirs_exist_ok=True)
    project = tomllib.loads((source / "pyproject.toml").read_text())["project"]
    python = _venv(project, work, row)
    if python is not None:
        _play(row, project, python, source, work)
    (work / f"{row.name}.json").write_text(json.dumps(dataclasses.asdict(row), indent=1))
    return row


def _play(row: Row, project: dict[str, Any], python: Path, source: Path, work: Path) -> None:
    """Install a package as a wheel, else what it requires beside its folder, and play it."""
    play = PLAYS.get(row.name, Play())
    environ = {**os.environ, **play.environ}
    wheel = [] if play.leave_out else [str(source), *play.install]
    if wheel and _run(_pip(python, work, *wheel), INSTALL_S) is None:
        row.installed = "wheel"
        row.embedded = _probe(python, row.name, "", play, environ, work)
    if not row.embedded.get("class"):  # the wheel lacks modules, or there is none
        _run(["uv", "pip", "uninstall", "-q", "--python", str(python), project["name"]], 60)
        row.installed = "from its folder" + _requirements(project, python, work, play)
        environ["PYTHONPATH"] = str(source.parent)
        row.embedded = _probe(python, row.name, "", play, environ, work)
    with _served(python, source, environ, row, work) as url:
        if url:
            row.with_package = _probe(python, row.name, url, play, environ, work)
            bare = {name: value for name, value in environ.items() if name != "PYTHONPATH"}
            row.without = _probe(Path(sys.executable), row.name, url, play, bare, work)


def _venv(project: dict[str, Any], work: Path, row: Row) -> Path | None:
    """Make an environment with our packages and openenv, from a compiled one of that Python.

    openenv imports gradio, whose compilation takes longer than all else here.
    """
    wants = str(project.get("requires-python", ">=3.11")).replace(">=3.10", ">=3.11")
    found = subprocess.run(
        ["uv", "python", "find", "--no-project", f"{wants},<3.14"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        row.installed = f"no: Python {wants} is not installed"
        return None
    base = work / "bases" / re.sub(r"\W+", "-", found.stdout.strip())
    with _bases:
        if base not in _fresh:
            ours = [str(ROOT / "packages" / name) for name in OURS]
            python = base / "bin/python"
            commands = [
                _pip(python, work, *ours, "openenv"),
                _pip(python, work, "--no-deps", "--reinstall", *ours),  # one kept has older ones
                [str(python), "-c", "import openenv.core, twinkle_agentic.envs.openenv.client"],
            ]
            if not base.exists():
                commands.insert(
                    0, ["uv", "venv", "-q", "--python", found.stdout.strip(), str(base)]
                )
            for command in commands:
                if (said := _run(command, INSTALL_S)) is not None:
                    sys.exit(f"{shlex.join(command)}: {said}")
            _fresh.add(base)
    venv = work / "venvs" / row.name
    shutil.rmtree(venv, ignore_errors=True)
    shutil.copytree(base, venv, symlinks=True, copy_function=os.link)
    return venv / "bin/python"


def _requirements(project: dict[str, Any], python: Path, work: Path, play: Play) -> str:
    """Install what a package requires one by one; returns which ones cannot be."""
    wanted = [each for each in project.get("dependencies", ()) if "openenv" not in each]
    failed: list[str] = []
    for each in (*wanted, *play.install):
        name = re.split(r"[ @<>=\[;]", each)[0]
        if name in play.leave_out or _run(_pip(python, work, each), INSTALL_S) is not None:
            failed.append(name)
    return f", without {', '.join(failed)}" if failed else ""


def _pip(python: Path, work: Path, *what: str) -> list[str]:
    command = ["uv", "pip", "install", "-q", "--python", str(python)]
    return [*command, "--override", str(work / "overrides.txt"), *what]


def _run(command: list[str], seconds: float) -> str | None:
    """Run to the end; returns the last line of what it complained of, or nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return f"no end within {seconds} s"
    if done.returncode == 0:
        return None
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    return lines[-1][:200] if lines else f"exit code {done.returncode}"


def _probe(
    python: Path, name: str, url: str, play: Play, environ: dict[str, str], work: Path
) -> dict[str, Any]:
    asked = {
        "env_name": name,
        "url": url,
        "moves": play.moves,
        "illegal": play.illegal,
        "env_kwargs": play.env_kwargs,
        "reset_kwargs": play.reset_kwargs,
    }
    command = [str(python), str(HERE / "probe.py"), json.dumps(asked)]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PROBE_S,
            check=False,
            env=environ,
            cwd=work / "empty",
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no end within {PROBE_S} s"}
    lines = done.stdout.splitlines()
    try:
        return json.loads(lines[-1])
    except (IndexError, ValueError):
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}


@contextlib.contextmanager
def _served(
    python: Path, source: Path, environ: dict[str, str], row: Row, work: Path
) -> Generator[str]:
    """Run the package's server, as a module or from its folder; yields its URL, or nothing."""
    empty, log = work / "empty", work / f"{row.name}.log"
    ways = ((f"{row.name}.server.app:app", empty), ("server.app:app", source))
    for app, folder in ways:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = [str(python), "-m", "uvicorn", app, "--port", str(port), "--log-level", "warning"]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env=environ,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            url = f"http://127.0.0.1:{port}"
            if _answers(process, url):
                row.server = "" if folder is empty else "from its folder only"
                yield url
                return
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    lines = [line for line in log.read_text().splitlines() if line.strip()]
    row.server = f"no: {lines[-1].strip()[:160] if lines else 'no word'}"
    yield ""


def _answers(process: subprocess.Popen[bytes], url: str) -> bool:
    deadline = time.monotonic() + SERVER_S
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    while process.poll() is None and time.monotonic() < deadline:
        try:
            opener.open(f"{url}/health", timeout=5).close()
        except urllib.error.HTTPError:
            return True
        except OSError:
            time.sleep(0.2)
        else:
            return True
    return False


def _wrong(row: Row, play: Play) -> list[str]:
    wrong: list[str] = []
    faces = {"embedded": row.embedded, "with the package": row.with_package, "without": row.without}
    played = {name: face for name, face in faces.items() if "reset" in face}
    texts = {name: _script(face, masked=play.varies) for name, face in played.items()}
    first = next(iter(texts), None)
    for name, text in texts.items():
        pair = text, texts[first or ""]
        if played[name].get("schema_error"):
            pair = _without_fields(pair[0]), _without_fields(pair[1])
        wrong += [f"{name}: {each}" for each in _differences(*pair)]
    for what, pattern in play.tells.items():
        wrong += [
            f"{name}: the first text does not tell the {what} ({pattern!r})"
            for name, face in played.items()
            if not re.search(pattern, face["reset"]["text"])
        ]
        if not played:
            wrong.append("it was not played")
    return wrong


def _script(face: dict[str, Any], *, masked: bool) -> dict[str, Any]:
    steps = face.get("steps", [])
    said = {"reset": face["reset"], "illegal": face.get("illegal")}
    said.update({} if masked else {f"step {i + 1}": step for i, step in enumerate(steps)})
    if masked:
        said = {name: step and _shape(step) for name, step in said.items()}
    return {**said, "tools": face["tools"]}


def _without_fields(script: dict[str, Any]) -> dict[str, Any]:
    """Leave out what a client cannot know of a server that fails to describe its action."""
    return json.loads(re.sub(r'; the fields are [^"]*', "", json.dumps({**script, "tools": None})))


def _shape(step: dict[str, Any]) -> dict[str, Any]:
    """Return what does not depend on random numbers: which fields a first text has."""
    if step["error"]:
        return {"error": re.sub(r"\d+", "N", step["error"])}
    return {"fields": re.findall(r"^(\w+):", step["text"], re.MULTILINE), "images": step["images"]}


def _differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    return [
        f"{name} is {json.dumps(one.get(name))[:300]}, not {json.dumps(value)[:300]}"
        for name, value in other.items()
        if one.get(name) != value
    ]


def _line(row: Row) -> str:
    return "| " + " | ".join(_cells(row)) + " |"


def _cells(row: Row) -> list[str]:
    play = PLAYS.get(row.name, Play())
    seen: dict[str, Any] = row.embedded if "reset" in row.embedded else row.with_package
    installed = row.installed + (f"; server {_short(row.server)}" if row.server else "")
    return [
        f"`{row.name}`",
        f"`{row.embedded['class']}`" if row.embedded.get("class") else "",
        _reset_cell(seen, play, row),
        _steps_cell(seen),
        _illegal_cell(seen),
        _tools_cell(seen),
        _client_cell("with the package", row.with_package, row),
        _client_cell("without", row.without, row),
        installed + (f". Needs {play.needs}" if play.needs else ""),
    ]


def _reset_cell(seen: dict[str, Any], play: Play, row: Row) -> str:
    if "reset" not in seen:
        return "none"
    reset = seen["reset"]
    cell = f"{len(reset['text'])} characters"
    cell += f", {reset['images']} image" if reset["images"] else ""
    told = [what for what, pattern in play.tells.items() if re.search(pattern, reset["text"])]
    return cell + (f"; tells {', '.join(told)}" if told else "")


def _steps_cell(seen: dict[str, Any]) -> str:
    steps: list[dict[str, Any]] = seen.get("steps") or []
    if not steps:
        return "not tried"
    earned = sum(step["reward"] for step in steps if step["error"] is None)
    failed = [step for step in steps if step["error"]]
    cell = f"{len(steps)} of {len(steps)}" if not failed else f"{len(failed)} fail"
    return cell + (", done" if steps[-1]["done"] else "") + f", return {earned:g}"


def _illegal_cell(seen: dict[str, Any]) -> str:
    step = seen.get("illegal")
    if step is None:
        return "not tried"
    ended = ", done" if step["done"] else "" if seen.get("goes_on") else ", then stuck"
    if step["error"]:
        return f"failed step{ended}"
    told = " and told" if "was not among" in step["text"] else ""
    return f"ruled on{told}: reward {step['reward']:g}{ended}"


def _tools_cell(seen: dict[str, Any]) -> str:
    cells: list[str] = []
    for tool in seen.get("tools") or ():
        function = tool["function"]
        cells.append(f"`{function['name']}({', '.join(function['parameters']['properties'])})`")
    return ", ".join(cells[:3]) + (f" and {len(cells) - 3} more" if len(cells) > 3 else "")


def _client_cell(way: str, face: dict[str, Any], row: Row) -> str:
    if not face:
        return "no server" if row.installed[:2] != "no" else ""
    if face.get("error"):
        return _short(face["error"])
    other = [m[1] for each in row.wrong if (m := re.match(rf"{way}: ([\w ]+?) is ", each))]
    cell = "plays, " + (f"`{face['class']}`" if face["class"] else "plain dicts")
    if face.get("schema_error"):
        cell += f", `env_action()` with any fields: {_short(face['schema_error'])}"
    return cell + (f"; **differs** in {', '.join(other)}" if other else "")


def _short(error: str) -> str:
    text = _PATH.sub("", " ".join(error.split()).replace("|", "/"))
    return text if len(text) <= 140 else f"{text[:140]}..."


def _page(rows: list[Row], commit: str, missing: list[str]) -> str:
    played = [row for row in rows if "reset" in row.embedded or "reset" in row.without]
    faces = [(row.embedded, row.with_package, row.without) for row in rows if not row.wrong]
    same = sum(
        all("reset" in face and not face.get("schema_error") for face in each) for each in faces
    )
    lines = [
        "# OpenEnv's environment packages",
        "",
        "Written by `nox -s openenv-packages -- path/to/OpenEnv`, which installs each package of "
        "the checkout in an environment of its own and plays it; do not edit.",
        "",
        f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d}, OpenEnv {commit[:12]}, openenv 0.10.0: "
        f"{len(rows)} packages, {len(played)} played, {same} of them in process, by the client "
        "with the package and by the client without it, with the same texts and tools (where the "
        "environment draws random numbers: the same fields in the first text).",
        "",
        "*Ruled on*: the environment answered the illegal move with a reward of its own; *told*: "
        "the text names the move as one that was not offered. *Failed step*: `error` is set, the "
        "model sees it, and the episode goes on. Where something was missing, the client's columns "
        "have the message that says so.",
        "",
        *([f"Not in this checkout: {', '.join(missing)}.", ""] if missing else []),
        "| package | class | first text | legal moves | illegal move | tools | client with the "
        "package | client without | installed, needs |",
        "|---|---|---|---|---|---|---|---|---|",
        *map(_line, rows),
    ]
    return "\n".join(lines) + "\n"


def _git(checkout: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(checkout), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


main()
