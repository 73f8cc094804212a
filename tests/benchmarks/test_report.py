"""The page about others: tables of what was measured, and plots in both themes."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.__main__ import main
from benchmarks.report import COLUMNS, LABELS, LEFT

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def figures(tmp_path: Path) -> Path:
    found = {
        f"peers.{prefix}.{name}.{figure}": 1000.0 * (at + 1)
        for prefix in ("one", "many200")
        for at, name in enumerate(("sqlite", "openai", "limit"))
        for figure in COLUMNS
    }
    rounds = [
        {name: {"turns_per_second": rate} for name in ("sqlite", "openai", "limit")}
        for rate in (900.0, 3100.0)
    ]
    found["peers.one.sqlite_over_openai"] = 2.0
    file = tmp_path / "peers.json"
    document = {
        "figures": found,
        "targets": {"peers.one.sqlite_over_openai": 1.1},
        "environment": {
            "platform": "an OS",
            "cpus": 2,
            "python": "3.11.7",
            "packages": {"perdure": "0.1.0"},
            "load": [1.0, 2.5, 3.0],
        },
        "details": {
            "turns": 3000,
            "rounds": {"peers.one": rounds, "peers.many200": rounds},
            "failed": {"peers.many200": {"adk": ["OperationalError: database is locked"]}},
        },
    }
    file.write_text(json.dumps(document))
    return file


def test_the_page_has_a_row_for_each_contender_that_was_measured(
    figures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["report", str(figures), "--images", str(tmp_path / "images")]) == 0
    page = capsys.readouterr().out
    assert page.count(LABELS["openai"]) == 2  # with one session, and with 200
    assert f"{LABELS['adk']} failed in 1 of 2 rounds: `OperationalError: database is" in page
    assert f"| {LABELS['adk']}" not in page
    assert "| `peers.one.sqlite_over_openai` | 2.00 | 1.1 |" in page
    assert page.count("2,000 (900 to 3,100)") == 2
    for said in (
        "2 rounds",
        "It was busy",
        "3,000 turns",
        "load was 2.5",
        "## 200 sessions at once",
    ):
        assert said in page
    for line in page.splitlines():
        if line.startswith("!["):
            assert (tmp_path / line.split("(")[1].rstrip(")")).exists()


def test_plots_fit_and_have_both_themes(figures: Path, tmp_path: Path) -> None:
    main(["report", str(figures), "--images", str(tmp_path)])
    for name in ("performance-1.svg", "performance-200.svg"):
        text = (tmp_path / name).read_text()
        assert "prefers-color-scheme: dark" in text
        root = ET.fromstring(text)  # noqa: S314  # our own
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        bars = [one for one in root.iter(f"{SVG}rect") if one.attrib["class"] != "page"]
        assert [one.attrib["class"] for one in bars] == ["ours", "theirs", "limit"]
        for bar in bars:
            assert float(bar.attrib["x"]) + float(bar.attrib["width"]) < width - 60
            assert float(bar.attrib["y"]) + float(bar.attrib["height"]) <= height


def test_the_longest_label_fits() -> None:
    """A character takes 7 pixels at most, on average."""
    assert max(len(label.replace("`", "").replace("*", "")) for label in LABELS.values()) * 7 < LEFT


def test_a_file_of_another_benchmark_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "save.json"
    file.write_text(json.dumps({"figures": {"save.bytes": 1.0}}))
    with pytest.raises(SystemExit, match="no figures"):
        main(["report", str(file), "--images", str(tmp_path)])


def test_the_adapters_have_rows_of_their_own(
    figures: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "adapters.json"
    found = {"adapters.adk.turns": 15.3, "adapters.langgraph.bytes": 0.00154}
    targets = {"adapters.adk.turns": 10.0, "adapters.langgraph.bytes": 0.005}
    found["adapters.claude.cpu_over_memory"] = 52.4
    details = {"cpu": {"ranges": {"adapters.claude.cpu_over_memory": [45.1, 68.8]}}}
    file.write_text(json.dumps({"figures": found, "targets": targets, "details": details}))
    images = str(tmp_path / "images")
    assert main(["report", str(figures), "--images", images, "--adapters", str(file)]) == 0
    page = capsys.readouterr().out
    assert "over `DatabaseSessionService` on SQLite | 15.3 | 10 at least |" in page
    assert "over `AsyncSqliteSaver` | 0.00154 | 0.005 at most |" in page
    assert "over `InMemorySessionStore` | 52.4 (45.1 to 68.8) |  |" in page
    assert "Pydantic AI" not in page
