"""``python -m tools.dashboard RUN [--port 8710]``: a run to look at, while it trains or afterwards.

One static page (``dashboard.html``: no build step, nothing from outside) and what it asks for, on 127.0.0.1:

    GET /                       the page
    GET /run                    config, and the lines of metrics, evaluations and the ledger so far
    GET /rollouts?step=S        the rollouts of a step (S 0: the last)
    GET /tokens?step=S&id=ID    the tokens of a rollout's rows, and what became of each (of a run with --keep_rows);
                                &url=URL, where several nodes have a rollout of that id: of this one alone
    GET /timeline?step=S        what the trainer and each node did, and when, over that step and the two before
    GET /metrics                the last step's numbers, as Prometheus reads them
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from functools import lru_cache
from pathlib import Path

from aiohttp import web
from transformers import AutoTokenizer

import gate
from rl import read_lines
from tools.trace import Run

PAGE = Path(__file__).with_name("dashboard.html")
FOLDER = web.AppKey("folder", Path)


async def page(request: web.Request) -> web.FileResponse:
    return web.FileResponse(PAGE)


async def run(request: web.Request) -> web.Response:
    folder = request.app[FOLDER]
    files = {name: read_lines(folder / f"{name}.jsonl") for name in ("metrics", "evaluations", "ledger")}
    ended = (folder / "summary.json").is_file()
    config = json.loads((folder / "config.json").read_text())
    return web.json_response({"name": folder.name, "ended": ended, "config": config} | files)


async def rollouts(request: web.Request) -> web.Response:
    step = Run(request.app[FOLDER]).step(int(request.query["step"]) or None)
    return web.json_response({"step": step.number, "rollouts": step.manifest["rollouts"]})


async def timeline(request: web.Request) -> web.Response:
    """In seconds since 1970, by each machine's own clock. Of the trainer, a step's parts one after the other; of a
    node, from and to when each rollout ran that a step consumed."""
    folder = request.app[FOLDER]
    kept, lines = Run(folder), {line["step"]: line for line in read_lines(folder / "metrics.jsonl")}
    last = kept.step(int(request.query["step"]) or None).number
    shown = [step for step in kept.steps if last - 3 < step.number <= last and step.number in lines]
    trainer, nodes = [], {}
    for step in shown:
        line = lines[step.number]
        seconds = [line[f"seconds/{part}"] for part in ("generate", "train", "sync")]
        trainer.append({"step": step.number, "from": line["seconds/clock"] - sum(seconds), "seconds": seconds})
        for one in step.rollouts:
            ran = {"id": one["rollout_id"], "from": one["ended"] - one["seconds"], "to": one["ended"]}
            nodes.setdefault(one["url"], []).append(ran | {"step": step.number, "status": one["status"]})
    return web.json_response({"trainer": trainer, "nodes": nodes})


@lru_cache(1)
def tokenizer_of(model: str):
    return AutoTokenizer.from_pretrained(model)


async def tokens(request: web.Request) -> web.Response:
    """Per row, its tokens: text, kind, and for sampled ones what the engine and the trainer said of them."""
    kept = Run(request.app[FOLDER])
    step = kept.step(int(request.query["step"]) or None)
    wanted, node = step.of_rollout(request.query["id"]), request.query.get("url")
    decided = {(*found["row"], at): (rank, found) for rank, _, at, found in step.tokens()}
    rows, tokenizer = [], tokenizer_of(kept.cfg.model)
    for (url, name), row in step.rows.items():
        if row.rollout_id != wanted or node not in (None, url):
            continue
        first, out = int(row.sampled.argmax()), []
        closing = {at for call in set(row.call[row.sampled].tolist()) for at in range(*row.calls[call]["closing"])}
        for at, token in enumerate(row.token_ids.tolist()):
            kind = "prompt" if at < first else "closing" if at in closing else "message"
            said = {"id": token, "text": tokenizer.decode([token]), "kind": kind}
            if row.experts.shape[1]:
                said["routes"] = row.experts[at].tolist() if row.experts_known[at] else None
            if row.sampled[at]:
                rank, found = decided[url, name, at]
                said |= {"kind": "sampled", "call": int(row.call[at]), "version": int(row.versions[at]),
                         "sampler": float(row.logprobs[at]), "trainer": found["logp"], "lag": found["lag"],
                         "ratio": math.exp(found["logp"] - float(row.logprobs[at])),
                         "reason": gate.REASONS[found["reason"]], "weight": found["weight"],
                         "advantage": found["advantage"], "rank": rank, "micro": found["micro"]}  # fmt: skip
            out.append(said)
        rows.append(
            {"row_id": row.row_id, "reward": row.reward, "status": row.status, "calls": row.calls, "tokens": out}
        )
    return web.json_response({"step": step.number, "rows": rows})


def prometheus(metrics: dict) -> str:
    """The text format 0.0.4; a meter's name with whatever Prometheus does not allow made ``_``."""
    known = {re.sub(r"\W", "_", name): value for name, value in metrics.items() if isinstance(value, int | float)}
    return "".join(f"# TYPE instar_{name} gauge\ninstar_{name} {value}\n" for name, value in known.items())


async def metrics(request: web.Request) -> web.Response:
    last = (read_lines(request.app[FOLDER] / "metrics.jsonl") or [{}])[-1]
    return web.Response(text=prometheus(last), content_type="text/plain", charset="utf-8")


@web.middleware
async def in_one_line(request: web.Request, handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except (ValueError, KeyError, OSError) as error:
        return web.Response(status=404, text=f"{' '.join(str(error).split())}")


def make_app(folder: Path) -> web.Application:
    """Raises ``ValueError`` where there is no run."""
    Run(folder)
    app = web.Application(middlewares=[in_one_line])
    app[FOLDER] = folder
    app.add_routes(
        [web.get("/", page), *(web.get(f"/{act.__name__}", act) for act in (run, rollouts, tokens, timeline, metrics))]
    )
    return app


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.dashboard", description="Look at a run.")
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--port", type=int, default=8710)
    asked = parser.parse_args()
    try:
        app = make_app(asked.run)
        print(f"http://127.0.0.1:{asked.port}", flush=True)
        web.run_app(app, host="127.0.0.1", port=asked.port, print=None)
    except (ValueError, OSError) as error:
        sys.exit(f"tools.dashboard: error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
