"""The page of a run, read in a real browser; trajectories in the terminal."""

from __future__ import annotations

import base64
import json
import shutil
import zlib
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright
from rich.console import Console

from twinkle_agentic.rollout.cli.refusal import RefusedError
from twinkle_agentic.rollout.cli.show import report, show
from twinkle_agentic.rollout.report import Run, RunNotFoundError, write_report

_CHROMIUM = shutil.which("chromium")
_FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
_HOSTILE = "</script><script>document.title='run by the page'</script><img src=x onerror=alert(1)>"


def _png() -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        body = kind + data
        return len(data).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    head = (3).to_bytes(4, "big") + (2).to_bytes(4, "big") + bytes([8, 2, 0, 0, 0])
    pixels = zlib.compress(b"".join(b"\0" + bytes(9) for _ in range(2)))
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    )


def _row(name: str, **changed: Any) -> dict[str, Any]:
    call = {
        "id": "c0",
        "type": "function",
        "function": {"name": "run_python", "arguments": json.dumps({"code": f"print('{name}')"})},
    }
    row: dict[str, Any] = {
        "id": name,
        "messages": [
            {"role": "user", "content": f"Solve {name}."},
            {"role": "assistant", "content": "I try.", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c0", "content": f"output of {name}"},
        ],
        "turns": 1,
        "stop_reason": "env_done",
        "reward": 1.0,
        "step_rewards": [1.0],
        "failed_steps": [],
        "error": None,
        "error_kind": None,
        "timing": {"queued": 0.1, "model": 2.0, "tools": 0.5, "total": 2.6},
    }
    return row | changed


def _write(folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "trajectories.jsonl").write_text(lines, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def browser() -> Generator[Browser]:
    if _CHROMIUM is None:
        pytest.skip("no chromium here: `apt-get install chromium`, as .ci/run does")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_CHROMIUM, args=_FLAGS)
        yield browser
        browser.close()


def _open(browser: Browser, file: Path, **options: Any) -> Page:
    page = browser.new_page(**options)
    page.set_default_timeout(30_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert problems == []
    return page


def _rows() -> list[dict[str, Any]]:
    token_turn = {"turn": 1, "token_ids": [5, 7], "logprobs": [-0.1, -3.0], "problem": None}
    image = {"type": "image_url", "image_url": {"url": "images/board.png"}}
    seen = [{"type": "text", "text": "?"}, image]
    return [
        _row("alpha", task="a", sample=0, token_turns=[token_turn]),
        _row("beta", task="a", sample=1),
        _row("gamma", task="b", sample=0, reward=0.0, stop_reason="max_turns"),
        _row("delta", task="b", sample=1, reward=None, stop_reason="api_error", error="HTTP 503"),
        _row("hostile", messages=[{"role": "user", "content": _HOSTILE}], error=_HOSTILE),
        _row("seen", messages=[{"role": "user", "content": seen}]),
    ]


@pytest.fixture
def page(browser: Browser, tmp_path: Path) -> Generator[Page]:
    folder = _write(tmp_path / "first", _rows())
    (folder / "images").mkdir()
    (folder / "images" / "board.png").write_bytes(_png())
    write_report([Run.open(folder)], folder / "report.html")
    page = _open(browser, folder / "report.html")
    yield page
    page.close()


def test_the_overview_says_rewards_groups_and_failures(page: Page) -> None:
    overview = page.locator("#overview")
    expect(overview).to_contain_text("5 of 6")
    expect(overview).to_contain_text("api_error")
    expect(overview).to_contain_text("HTTP 503")
    # Both samples of `a` have the reward 1, and only one of `b` has any.
    expect(overview.locator(".panel", has_text="Groups without spread")).to_contain_text("a")


def test_filters_and_search_narrow_the_list(page: Page) -> None:
    page.click("#tab-trajectories")
    expect(page.locator("#count")).to_have_text("6 of 6")
    page.select_option("#reward", "none")
    expect(page.locator("#count")).to_have_text("1 of 6")
    expect(page.locator(".row b")).to_have_text("delta")
    page.select_option("#reward", "")
    page.select_option("#stop", "max_turns")
    expect(page.locator(".row b")).to_have_text("gamma")
    page.select_option("#stop", "")
    page.fill("#text", "Output of BETA")
    page.press("#text", "Enter")
    expect(page.locator("#count")).to_have_text("1 of 6")
    page.fill("#text", "print('alpha')")
    page.press("#text", "Enter")
    expect(page.locator(".row b")).to_have_text("alpha")


def test_a_trajectory_shows_code_tokens_and_folds(page: Page) -> None:
    page.click("#tab-trajectories")
    page.click(".row:has-text('alpha')")
    detail = page.locator("#detail")
    expect(detail.locator("pre.code").first).to_have_text("print('alpha')")
    expect(detail.locator(".tokens i")).to_have_count(2)
    opened = detail.locator("details[open]")
    expect(opened).to_have_count(3)
    detail.locator("details.tool > summary").click()
    expect(opened).to_have_count(2)
    page.keyboard.press("e")
    expect(opened).to_have_count(4)


def test_an_image_beside_the_run_is_shown(page: Page) -> None:
    page.click("#tab-trajectories")
    page.click(".row:has-text('seen')")
    image = page.locator("#detail img")
    expect(image).to_have_js_property("naturalWidth", 3)


def test_what_a_model_wrote_is_never_run(page: Page) -> None:
    page.click("#tab-trajectories")
    page.click(".row:has-text('hostile')")
    expect(page.locator("#detail details.user pre")).to_have_text(_HOSTILE)
    expect(page.locator("#detail img")).to_have_count(0)
    expect(page).to_have_title("first")


def test_two_runs_stand_side_by_side(browser: Browser, tmp_path: Path) -> None:
    first = _write(tmp_path / "first", [_row("alpha"), _row("beta", reward=0.0)])
    second = _write(tmp_path / "second", [_row("alpha", reward=0.25), _row("beta")])
    write_report([Run.open(first), Run.open(second)], tmp_path / "both.html")
    page = _open(browser, tmp_path / "both.html", color_scheme="dark")
    page.click("#tab-compare")
    lines = page.locator("#compare tr.link")
    expect(lines).to_have_count(2)
    expect(lines.first).to_contain_text("-0.75")
    lines.first.click()
    expect(page.locator("#both h2")).to_have_count(4)
    page.close()


def test_many_trajectories_scroll_with_few_elements(browser: Browser, tmp_path: Path) -> None:
    folder = _write(tmp_path / "large", [_row(f"t{number}") for number in range(3000)])
    write_report([Run.open(folder)], tmp_path / "large.html")
    page = _open(browser, tmp_path / "large.html", viewport={"width": 390, "height": 800})
    page.click("#tab-trajectories")
    page.locator("#list").evaluate("node => node.scrollTo(0, node.scrollHeight)")
    expect(page.locator(".row b").last).to_have_text("t2999")
    assert page.locator(".row").count() < 60
    page.close()


def test_a_run_that_has_not_ended_is_read_without_its_half_line(tmp_path: Path) -> None:
    part = tmp_path / "trajectories.jsonl.part"
    part.write_text(json.dumps(_row("alpha")) + "\n" + '{"id": "be', encoding="utf-8")
    run = Run.open(tmp_path)
    assert run.unfinished
    assert [row["id"] for row in run.rows()] == ["alpha"]


def test_a_broken_line_is_refused_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "trajectories.jsonl").write_text('{"id": 1}\n{"id": \n', encoding="utf-8")
    with pytest.raises(ValueError, match="line 2: not JSON"):
        list(Run.open(tmp_path).rows())


def test_a_folder_without_a_run_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(RunNotFoundError, match="give the folder that"):
        Run.open(tmp_path)
    with pytest.raises(RunNotFoundError, match="no such file"):
        Run.open(tmp_path / "nowhere")


def test_an_image_outside_the_run_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "secret.png").write_bytes(_png())
    part = {"type": "image_url", "image_url": {"url": "../secret.png"}}
    folder = _write(tmp_path / "run", [_row("a", messages=[{"role": "user", "content": [part]}])])
    (row,) = Run.open(folder).rows()
    assert row["messages"][0]["content"][0]["image_url"]["url"] == "../secret.png"


def test_a_failed_report_leaves_the_earlier_page(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_row("alpha")])
    page = folder / "report.html"
    page.write_text("earlier")
    (folder / "trajectories.jsonl").write_text("[]\n")
    with pytest.raises(RefusedError, match="not a JSON object"):
        report(Console(), runs=[folder])
    assert page.read_text() == "earlier"
    assert sorted(path.name for path in folder.iterdir()) == ["report.html", "trajectories.jsonl"]


def _shown(folder: Path, **options: Any) -> tuple[int, str]:
    console = Console(width=100, record=True, emoji=False)
    code = show(console, run=folder, **options)
    return code, console.export_text()


def test_show_prints_code_as_it_is(tmp_path: Path) -> None:
    call = {"function": {"name": "run_python", "arguments": json.dumps({"code": "if x:\n    y()"})}}
    row = _row("alpha", messages=[{"role": "assistant", "content": "", "tool_calls": [call]}])
    code, text = _shown(_write(tmp_path / "run", [row]), ids=["alpha"])
    assert code == 0
    assert "if x:" in text
    assert "    y()" in text


def test_show_failed_prints_each_error_whole(tmp_path: Path) -> None:
    error = "word " * 200
    rows = [_row("alpha"), _row("beta", reward=None, error=error, earlier_errors=["first try"])]
    code, text = _shown(_write(tmp_path / "run", rows), failed=True)
    assert code == 0
    assert "alpha" not in text
    assert text.count("word") == 200
    assert "attempt 1: first try" in text


def test_show_of_an_unknown_id_names_some_that_are_known(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_row("alpha")])
    with pytest.raises(RefusedError, match=r"no trajectory 'beta7'.*'alpha'"):
        _shown(folder, ids=["beta7"])


def test_show_of_a_group_and_of_nothing(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", _rows())
    assert "gamma" in _shown(folder, group="b")[1]
    assert _shown(folder, group="c")[0] == 1
    assert "more follow" in _shown(folder, limit=2)[1]


def test_the_page_needs_no_network(tmp_path: Path) -> None:
    folder = _write(tmp_path / "run", [_row("alpha")])
    write_report([Run.open(folder)], tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    assert "default-src 'none'" in text
    assert "http://" not in text.replace("http://www.w3.org/2000/svg", "")
    packed = text.split('id="chunk-0">')[1].split("<")[0]
    assert json.loads(zlib.decompress(base64.b64decode(packed)))[0]["id"] == "alpha"
