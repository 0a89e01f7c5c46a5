"""A dashboard whose answers a test makes up: the real page and headers, invented data.

The browser itself is intercepted, so there is no server, and a request to any other place is
noted and refused.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import plotly

import headway
from headway.control.schema import COMMANDS
from headway.control.security import ANSWER_HEADERS

HOST = "http://dashboard.localhost"
TOKENS = {"control-token-0123456789": "control", "read-token-0123456789": "read"}
CONTROL, READ = TOKENS
_ASSETS = Path(headway.__file__).parent / "control" / "dashboard" / "assets"
_PLOTLY = Path(plotly.__file__).parent / "package_data" / "plotly.min.js"
_DRAWS_NOTHING = b"globalThis.Plotly = {react: async (box) => { box.on = () => {}; }, purge() {}};"
_KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}


def make_run(name: str, state: str = "running", **other: Any) -> dict[str, Any]:
    now = time.time()
    return {
        "id": name.replace(" ", "-"),
        "name": name,
        "output_dir": f"/runs/{name}",
        "state": state,
        "step": 500,
        "max_steps": 1000,
        "epoch": 0.5,
        "started_at": now - 600,
        "updated_at": now,
        "controllable": state in ("running", "paused"),
        "job_id": "job" if state in ("running", "paused") else None,
        "latest": {"loss": 2.5, "eval_loss": 2.75, "learning_rate": 3e-4, "mfu": 0.41},
        "incidents": 0,
        "post_mortem": state == "failed",
        **other,
    }


def falling(run: dict[str, Any], key: str) -> tuple[list[float], list[Any]]:
    """Curves as of a run that goes well."""
    steps = range(10, run["step"] + 1, 10)
    shapes: dict[str, Callable[[int], float]] = {
        "loss": lambda s: 2 + 6 * math.exp(-s / 150) + 0.1 * math.sin(s * 1.7),
        "eval_loss": lambda s: 2.1 + 6 * math.exp(-s / 150),
        "learning_rate": lambda s: 3e-4 * min(1.0, s / 100),
        "grad_norm": lambda s: 0.6 + 0.3 * math.cos(s * 0.9),
        "tokens_per_second": lambda s: 48_000 + 500 * math.sin(s),
        "mfu": lambda s: 0.41 + 0.01 * math.sin(s),
        "peak_mem": lambda s: 21.3 * 2**30,
    }
    shape = shapes.get(key, lambda s: s / 100)
    return [float(s) for s in steps], [shape(s) for s in steps]


class Stub:
    """Answers for a browser page; a test changes the attributes as it likes."""

    def __init__(self, *runs: dict[str, Any], standalone: bool = True) -> None:
        self.runs, self.standalone = list(runs), standalone
        self.keys = ["loss", "eval_loss", "learning_rate", "grad_norm", "tokens_per_second"]
        self.keys += ["mfu", "peak_mem", "f1/layers.0,1"]
        self.curve = falling
        self.status: dict[str, Any] = {}
        self.config: dict[str, Any] = {"args.learning_rate": 3e-4, "model.hidden_size": 64}
        self.files = ["run/config.json"]
        self.diff: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.samples: list[dict[str, Any]] = []
        self.incidents: list[dict[str, Any]] = []
        self.post_mortem: dict[str, Any] = {}
        self.refusals: dict[str, tuple[int, dict[str, Any]]] = {}
        """Command -> status and body of the answer."""
        self.message, self.settled = "", "applied"
        self.silent = False
        self.withheld = ""
        """A part of addresses that are not answered until `release`."""
        self._waiting: list[Any] = []
        self.plotly = "none"
        """`real`; `none` (a script that draws nothing and is quick to load); or `absent`."""
        self.commands: list[dict[str, Any]] = []
        self.asked: list[str] = []
        self.elsewhere: list[str] = []

    def attach(self, page: Any) -> None:
        page.context.route("**/*", self._answer)

    def open(self, page: Any, token: str | None = CONTROL, more: str = "") -> None:
        self.attach(page)
        page.goto(HOST + "/" + (f"#token={token}{more}" if token else ""))

    @property
    def is_withholding(self) -> bool:
        return bool(self._waiting)

    def release(self) -> None:
        """Answer what was withheld."""
        self.withheld, waiting, self._waiting = "", self._waiting, []
        for route in waiting:
            self._answer(route)

    # -- answers ------------------------------------------------------------------------------

    def _answer(self, route: Any) -> None:
        request = route.request
        if not request.url.startswith(HOST + "/"):
            self.elsewhere.append(request.url)
            route.abort()
            return
        path = urlsplit(request.url).path
        if path == "/" or path.startswith("/assets/"):
            self._answer_file(route, path.removeprefix("/assets/").strip("/") or "index.html")
            return
        self.asked.append(request.url.removeprefix(HOST))
        if self.silent:
            route.abort("connectionrefused")
            return
        if self.withheld and self.withheld in request.url:
            self._waiting.append(route)
            return
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        if token not in TOKENS:
            self._send(route, {"error": "authentication required"}, 401)
        elif request.method == "POST":
            self._take(route, json.loads(request.post_data))
        else:
            query = parse_qs(urlsplit(request.url).query)
            value = self._read(path.removeprefix("/api/").split("/"), query, TOKENS[token])
            self._send(route, value, 200 if value is not None else 404)

    def _answer_file(self, route: Any, name: str) -> None:
        file = _PLOTLY if name == "plotly.min.js" else _ASSETS / name
        if (file == _PLOTLY and self.plotly == "absent") or not file.is_file():
            self._send(route, {"error": "not there"}, 404)
            return
        headers = {**ANSWER_HEADERS, "Content-Type": _KINDS[file.suffix]}
        if file == _PLOTLY and self.plotly == "none":
            route.fulfill(body=_DRAWS_NOTHING, headers=headers)
        else:
            route.fulfill(path=file, headers=headers)

    def _send(self, route: Any, value: Any, status: int = 200) -> None:
        headers = {**ANSWER_HEADERS, "Content-Type": "application/json; charset=utf-8"}
        route.fulfill(body=json.dumps(value), status=status, headers=headers)

    def _take(self, route: Any, body: dict[str, Any]) -> None:
        if "command" not in body:
            self._send(route, {"state": "verified", "message": self.message})
            return
        self.commands.append(body)
        if body["command"] in self.refusals:
            status, answer = self.refusals[body["command"]]
            self._send(route, answer, status)
            return
        self._send(route, {"id": body["id"], "command": body["command"], "state": "accepted"})

    def _read(self, parts: list[str], query: dict[str, list[str]], role: str) -> Any:
        match parts:
            case ["session"]:
                return {"role": role, "standalone": self.standalone, "version": "0"}
            case ["commands"]:
                return {name: asdict(kind) for name, kind in COMMANDS.items()}
            case ["runs"]:
                return {"runs": self.runs}
            case ["diff"]:
                return {"rows": self.diff}
            case ["runs", run_id, what]:
                run = next((run for run in self.runs if run["id"] == run_id), None)
                return run and self._about(run, what, query)
            case ["runs", _, "commands", command_id]:
                sent = next(c for c in self.commands if c["id"] == command_id)
                if self.settled == "gone":
                    return None
                return {
                    "id": command_id,
                    "command": sent["command"],
                    "state": self.settled,
                    "step": self.runs[0]["step"],
                    "message": self.message,
                }
        return None

    def _about(self, run: dict[str, Any], what: str, query: dict[str, list[str]]) -> Any:
        if what == "keys":
            return {"keys": [{"name": key} for key in self.keys], "x": ["step", "tokens", "time"]}
        if what == "series":
            asked = {name: values[0] for name, values in query.items()}
            series = self._series(run, query["key"], asked)
            return {"x": asked["x"], "series": series, "until": 0}
        if what == "status":
            return {"status": "training", "global_step": run["step"], **self.status}
        if what == "config":
            return {"config": self.config, "files": self.files}
        if what == "post_mortem":
            return self.post_mortem
        return {what: getattr(self, what)}

    def _series(
        self, run: dict[str, Any], keys: list[str], query: dict[str, str]
    ) -> dict[str, Any]:
        scale = {"step": 1, "tokens": 4096, "time": 0.5}[query["x"]]
        low, high = float(query.get("from", "-inf")), float(query.get("to", "inf"))
        series = {}
        for key in keys:
            x, y = self.curve(run, key)
            kept = [(a * scale, b) for a, b in zip(x, y) if low <= a * scale <= high]
            thin = kept[:: max(1, len(kept) // int(query["points"]))]
            more = {}
            if "smoothing" in query:
                more["smooth"] = [None if isinstance(b, str) else b / 2 for _, b in thin]
            series[key] = {
                **more,
                "x": [a for a, _ in thin],
                "y": [b for _, b in thin],
                "total": len(kept),
                "decimated": len(thin) < len(kept),
            }
        return series
