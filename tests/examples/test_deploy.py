"""The files of examples/deploy: what they name is there, and what they run runs."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import perdure
from perdure import Message, Shutdown
from perdure.observe.metrics import FIGURES
from tests.source_tree import ROOT

DEPLOY = ROOT / "examples" / "deploy"
UNITS = ("perdure-backup.service", "perdure-backup.timer")


def loaded(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def options(name: str) -> dict[str, str]:
    """Return the options of a systemd unit that are given once."""
    lines = (DEPLOY / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and line[0] != "#")


def test_the_alerts_ask_for_metrics_and_labels_that_are_there() -> None:
    figures = {figure.in_prometheus: figure for figure in FIGURES}
    rules = loaded("perdure-alerts.yml")["groups"][0]["rules"]
    page = (ROOT / "docs" / "observing.md").read_text(encoding="utf-8")
    alerts = page.split("## Alerts")[1].split("\n## ")[0]
    assert re.findall(r"^\| `(\w+)`", alerts, re.MULTILINE) == [rule["alert"] for rule in rules]
    for rule in rules:
        asked = re.findall(r'(perdure_\w+)(?:\{(\w+)="(\w+)"\})?', rule["expr"])
        assert asked
        for name, label, value in asked:
            figure = figures[name.removesuffix("_bucket")]
            assert name.endswith("_bucket") == (figure.kind == "histogram")
            assert label in ("", figure.label)
            if value and figure.labels:
                assert value in figure.labels
        assert set(rule) <= {"alert", "expr", "for", "labels", "annotations"}
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"page", "ticket"}


def test_prometheus_scrapes_each_worker_of_the_compose_file() -> None:
    services = loaded("compose.yaml")["services"]
    workers = {name: service for name, service in services.items() if name.startswith("chat-")}
    assert len(workers) == 2
    prometheus = loaded("prometheus.yml")
    (job,) = prometheus["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"{name}:8000" for name in workers]
    mounted = {
        mount.split(":")[0]: mount.split(":")[1] for mount in services["prometheus"]["volumes"]
    }
    for source, target in mounted.items():
        assert (DEPLOY / source).is_file()
        assert target.startswith("/etc/prometheus/")
    (rules,) = prometheus["rule_files"]
    assert f"/etc/prometheus/{rules}" in mounted.values()


def test_the_workers_are_built_from_what_is_there_and_have_time_to_stop() -> None:
    compose = loaded("compose.yaml")
    ports = set()
    for name in ("chat-1", "chat-2"):
        worker = compose["services"][name]
        context = (DEPLOY / worker["build"]["context"]).resolve()
        assert context == ROOT
        assert (context / worker["build"]["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
        url = worker["environment"]["PERDURE_URL"]
        password = re.search(r"\$\{.*?\}", url)
        assert password is not None
        store = perdure.store_for(url.replace(password[0], "secret"))
        assert store.location.startswith("postgresql://chat@postgres")
        assert worker["depends_on"] == {"postgres": {"condition": "service_healthy"}}
        assert worker["stop_grace_period"] == "30s"
        (port,) = worker["ports"]
        ports.add(port)
        assert port.endswith(":8000")
    assert len(ports) == 2
    server = compose["services"]["postgres"]
    assert server["environment"]["POSTGRES_USER"] == "chat"
    assert server["volumes"][0].split(":")[0] in compose["volumes"]

    dockerfile = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
    for sources in re.findall(r"^COPY (.+) \S+$", dockerfile, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    command = re.search(r"^CMD (\[.*\])$", dockerfile, re.MULTILINE)
    assert command is not None
    words = yaml.safe_load(command[1])
    assert words[:2] == ["uvicorn", "chat_server:app"]
    assert words[-2:] == ["--timeout-graceful-shutdown", "10"]
    assert words[words.index("--port") + 1] == "8000"


async def test_the_backup_unit_backs_up(tmp_path: Path) -> None:
    async with perdure.connect(tmp_path / "agents", shutdown=Shutdown(signals=False)) as sessions:
        async with sessions.open("ada") as session, session.turn():
            session.append(Message.user("Hello"))
    program, *words = shlex.split(options("perdure-backup.service")["ExecStart"])
    assert program.endswith("/perdure")
    words = [
        word.replace("/var/lib/harbor", str(tmp_path)).replace("s3://backups", str(tmp_path / "b"))
        for word in words
    ]
    (tmp_path / "b").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "perdure", *words], capture_output=True, text=True, check=True
    )
    assert "1 of 1 sessions written" in done.stdout
    assert "verified: 1 session," in done.stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    for name in UNITS:
        text = (DEPLOY / name).read_text(encoding="utf-8")
        text = text.replace("/srv/harbor/.venv/bin/perdure", sys.executable)
        (tmp_path / name).write_text(text.replace("User=harbor", "User=root"), encoding="utf-8")
    command = ["systemd-analyze", "verify", *(str(tmp_path / name) for name in UNITS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_timer_starts_the_service() -> None:
    service, timer = UNITS
    assert Path(service).stem == Path(timer).stem
    assert "Unit" not in options(timer)
    assert options(timer)["OnCalendar"] == "*-*-* 03:15:00"
