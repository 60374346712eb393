"""Where a token came from and what it did, of a run with ``--keep_rows``:

    python -m tools.trace RUN [--step S] [--token N | --rollout ID]
    python -m tools.trace RUN --check

Without ``--check`` it prints, for the N-th sampled token of a step, the chain from the engine call that sampled it to
its share of the loss; with ``--rollout``, a line for each token of a rollout. ``--check`` verifies a whole run offline:

1. what the trainer fetched is what the manifests listed, and every sampled token has one sampling event, in one row;
2. every sampled token has one decision; the gate, called again on the kept log-probs, decides the same; denominators
   and the ledger's counts are the sums of the decisions, and its lines balance, each with the one before;
3. log-probs scored again agree, wherever the weights of a version are kept: the model that the run began with, and its
   checkpoints. The trainer's and, in rows of one version (or of a dense model), the engine's, within ``probe_bound``.

Legend: S sampled tokens of a step, over its ranks in order.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoTokenizer

import gate
import rl
from loopback import Row, unpack_rows
from tools.export import export


class Step:
    """What a run kept of one step. Two nodes may give a rollout, and a row, the same name: an id is one with its node's
    address."""

    def __init__(self, run: Path, cfg: rl.TrainConfig, manifest: dict):
        self.run, self.cfg, self.manifest, self.number = run, cfg, manifest, manifest["step"]
        self.version = (self.number - 1) * cfg.versions_per_step
        """The trainer's, when it scored the batch."""
        self.rollouts = manifest["rollouts"]

    @cached_property
    def rows(self) -> dict[tuple[str, str], Row]:
        """By node and id. Raises ``ValueError`` where one was fetched twice, or is not as its manifest listed it."""
        rows = [(url, row) for url in sorted({rollout["url"] for rollout in self.rollouts})
                for path in sorted(rl.kept_rows(self.run, url, self.number).glob("*.safetensors"))
                for row in unpack_rows(path.read_bytes())]  # fmt: skip
        fetched = Counter((url, row.row_id, len(row), int(row.sampled.sum())) for url, row in rows)
        listed = Counter((rollout["url"], row["row_id"], row["tokens"], row["sampled"]) for rollout in self.rollouts
                         for row in rollout["rows"])  # fmt: skip
        expect(fetched == listed, f"step {self.number}: rows (node, id, tokens, sampled) fetched but not listed "
               f"{list(fetched - listed)}, listed but not fetched {list(listed - fetched)}")  # fmt: skip
        return {(url, row.row_id): row for url, row in rows}

    def of_rollout(self, rollout_id: str) -> str:
        """The id. Raises ``ValueError`` where the step has no such rollout."""
        known = [rollout["rollout_id"] for rollout in self.rollouts]
        expect(rollout_id in known, f"no rollout {rollout_id} in step {self.number}: {', '.join(known)}")
        return rollout_id

    @cached_property
    def decisions(self) -> list[tuple[list[str], dict[str, torch.Tensor]]]:
        """A rank's rows' names, and its tensors ``[S]``, without those of fillers, which no engine sampled."""
        found, folder = [], rl.step_folder(self.run, "decisions", self.number)
        paths = sorted(folder.glob("rank-*.safetensors"), key=lambda path: int(path.stem[5:]))
        expect(paths, f"{folder} holds no decisions: was the run started with --keep_rows True?")
        for path in paths:
            with safe_open(path, "pt") as file:
                names = json.loads(file.metadata()["rows"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            real_S = torch.tensor([bool(names[n]) for n in tensors["row"]])
            found.append((names, {name: tensor[real_S] for name, tensor in tensors.items()}))
        return found

    def tokens(self) -> Iterator[tuple[int, Row, int, dict]]:
        """Rank, row, position in it and decision of every sampled token, with ``rollout`` and ``row`` looked up."""
        for rank, (names, tensors) in enumerate(self.decisions):
            for values in zip(*(tensor.tolist() for tensor in tensors.values()), strict=True):
                found = dict(zip(tensors, values, strict=True))
                found["rollout"] = self.rollouts[found["rollout"]]
                found["row"] = found["rollout"]["url"], names[found["row"]]
                yield rank, self.rows[found["row"]], found["at"], found


def expect(condition, message: str) -> None:
    if not condition:
        raise ValueError(message)


class Run:
    """A run's folder."""

    def __init__(self, path: Path):
        self.path = path
        expect((path / "config.json").is_file(), f"{path} is no run's folder: it has no config.json")
        self.cfg = rl.TrainConfig(**json.loads((path / "config.json").read_text()))
        schedule = rl.read_lines(path / "schedule.jsonl")
        self.steps = [Step(path, self.cfg, line) for line in schedule if "rollouts" in line]
        self.ledger = rl.read_lines(path / "ledger.jsonl")
        self.ended = [line["sampled"] for line in schedule if "rollouts" not in line]
        """What the nodes said at the end that they ever sampled; nothing, for a run that did not end."""

    def step(self, number: int | None) -> Step:
        expect(self.steps, f"{self.path} has no step yet")
        numbers = [step.number for step in self.steps]
        expect(number in (None, *numbers), f"no step {number} in {self.path}: there are {numbers[0]} to {numbers[-1]}")
        return self.steps[-1 if number is None else numbers.index(number)]


# ------------------------------------------------------------------------------------------------------ one token


def chain(step: Step, number: int, tokenizer) -> str:
    """The whole way of the step's ``number``-th sampled token."""
    tokens = list(step.tokens())
    expect(0 <= number < len(tokens), f"no token {number} in step {step.number}: it has 0 to {len(tokens) - 1}")
    rank, row, at, found = tokens[number]
    rollout, index = found["rollout"], int(row.call[at])
    call, place = row.calls[index], int((row.call[:at] == index).sum())
    token, behaviour = int(row.token_ids[at]), float(row.logprobs[at])
    routes = "  ".join(f"layer {n} {sorted(experts)}" for n, experts in enumerate(row.experts[at].tolist()))
    decided = f"weight {found['weight']:.6g}" if found["weight"] else "not trained"
    known = "replayed" if row.experts_known[at] else "not known: routed live"
    lines = {
        "rollout": f"{row.rollout_id} of task {row.task_id}, group {rollout['group']}, node {rollout['url']}: "
                   f"{row.status}, reward {row.reward:.4g}",
        "engine call": f"{index + 1} of {len(row.calls)} of its rollout, by {call['wire']}, engine "
                       f"{' then '.join(map(str, call['engines']))}: {call['prompt_tokens']} prompt tokens, "
                       f"{call['sampled']} sampled in {call['seconds']} s, finish reason {call['finish_reason']}",
        "sampled": f"id {token} {tokenizer.decode([token])!r}, token {place + 1} of that call, by policy version "
                   f"{row.versions[at]}, log-prob {behaviour:.6f} at temperature {row.temperature:g}",
        **({"routes": f"{routes}  ({known})"} if routes else {}),
        "row": f"{row.row_id}, position {at} of {len(row)}; rank {rank}, micro-batch {found['micro']}",
        "trainer": f"log-prob {found['logp']:.6f} at version {step.version}, lag {found['lag']}; ratio "
                   f"{torch.tensor(found['logp'] - behaviour).exp():.6g}",
        "gate": f"{gate.REASONS[found['reason']]}, {decided}",
        "credit": f"advantage {found['advantage']:.6g}",
        "loss": f"one of the tokens over the {step.cfg.denominator} denominator {found['denominator']:g}: "
                f"weight x advantage / denominator = "
                f"{found['weight'] * found['advantage'] / found['denominator']:.4g}",
    }  # fmt: skip
    head = f"step {step.number}, token {number} of {len(tokens)}\n"
    return head + "\n".join(f"  {name:12}{text}" for name, text in lines.items())


def table(step: Step, rollout_id: str, tokenizer) -> str:
    """A line for each token of a rollout, with the number by which ``--token`` finds it."""
    step.of_rollout(rollout_id)
    lines = ["token  row           at call version  log-prob   trainer    weight  advantage  gate        text"]
    for number, (_, row, at, found) in enumerate(step.tokens()):
        if row.rollout_id == rollout_id:
            lines.append(f"{number:5d}  {row.row_id:10} {at:5d} {row.call[at]:4d} {row.versions[at]:7d} "
                         f"{row.logprobs[at]:9.4f} {found['logp']:9.4f} {found['weight']:9.4f} "
                         f"{found['advantage']:10.4f}  {gate.REASONS[found['reason']]:10}  "
                         f"{tokenizer.decode([int(row.token_ids[at])])!r}")  # fmt: skip
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------- the whole run


def check(run: Run) -> list[str]:
    """Verify a kept run, and say what was verified. Raises ``ValueError`` at the first thing that is wrong."""
    events, pending, tokens = set(), 0, 0
    expect(
        [line["step"] for line in run.ledger[: len(run.steps)]] == [step.number for step in run.steps],
        f"the ledger has {len(run.ledger)} lines, the schedule {len(run.steps)} steps, and not of the same steps",
    )
    for step, line in zip(run.steps, run.ledger, strict=False):  # a run that ended has one line more
        check_events(step, events)
        check_decisions(step, line)
        tokens += sum(len(tensors["row"]) for _, tensors in step.decisions)
    for line in run.ledger:
        gone = line["trained"] + line["masked"] + sum(line["gated"].values()) + sum(line["dropped"].values())
        balance = line["sampled"] + line["pending_before"], gone + line["pending_after"]
        expect(balance[0] == balance[1], f"ledger, step {line['step']}: {balance[0]} != {balance[1]}: {line}")
        expect(line["pending_before"] == pending, f"ledger, step {line['step']}: {line['pending_before']} tokens were "
               f"pending, the line before left {pending}")  # fmt: skip
        pending = line["pending_after"]
    total = sum(line["sampled"] for line in run.ledger)
    expect(run.ended in ([], [total]), f"the ledger holds {total} sampled tokens, the engines' own count {run.ended}")
    said = [f"{len(run.steps)} steps, {tokens} sampled tokens: one sampling event and one decision each",
            f"the gate decides the same again; {len(run.ledger)} ledger lines balance"]  # fmt: skip
    return [*said, *check_logprobs(run)]


def check_events(step: Step, events: set) -> None:
    """No token of a rollout's call is in two rows, or in two steps; a row's calls are among those of its rollout."""
    for (url, _), row in step.rows.items():
        mine, place = set(), Counter()
        for at in row.sampled.nonzero()[0].tolist():
            mine.add((url, row.rollout_id, int(row.call[at]), place[row.call[at]]))
            place[row.call[at]] += 1
        expect(not mine & events, f"step {step.number}, row {row.row_id}: tokens {sorted(mine & events)[:3]} (node, "
               "rollout, call, number) are in another row as well")  # fmt: skip
        events |= mine
        for call, number in place.items():
            told = row.calls[call]["sampled"]
            expect(number == told, f"step {step.number}, row {row.row_id}: {number} tokens of call {call}, which "
                   f"sampled {told}")  # fmt: skip


def check_decisions(step: Step, line: dict) -> None:
    """Each sampled token has one decision, which is the gate's; the denominators and the ledger are their sums."""
    cfg, group_N = step.cfg, rl.groups_of(step.rollouts)
    owners = {(one["url"], row["row_id"]): n for n, one in enumerate(step.rollouts) for row in one["rows"]}
    spots = Counter((*found["row"], at) for _, _, at, found in step.tokens())
    whole = Counter((*name, at) for name, row in step.rows.items() for at in row.sampled.nonzero()[0].tolist())
    expect(spots == whole, f"step {step.number}: tokens (node, row, position) without a decision "
           f"{list(whole - spots)[:3]}, decided twice or never sampled {list(spots - whole)[:3]}")  # fmt: skip
    totals, parts = Counter(), []
    for rank, (names, tensors) in enumerate(step.decisions):
        urls = [step.rollouts[n]["url"] for n in tensors["rollout"]]
        places = [(url, names[n]) for url, n in zip(urls, tensors["row"], strict=True)]
        rows = [step.rows[place] for place in places]
        behaviour_S = torch.tensor([row.logprobs[at] for row, at in zip(rows, tensors["at"].tolist(), strict=True)])
        version_S = torch.tensor([row.versions[at] for row, at in zip(rows, tensors["at"].tolist(), strict=True)])
        rollout_S = torch.tensor([owners[place] for place in places])
        trained_S = torch.ones(len(rows), dtype=torch.bool)
        again = gate.gate(
            **rl.read_gate(cfg.gate), log_ratio_T=gate.log_ratio(tensors["logp"], behaviour_S.float(), trained_S),
            rollout_T=rollout_S, trained_T=trained_S, lag_T=gate.lag(version_S.long(), step.version, trained_S),
            max_lag=cfg.max_lag, behaviour_T=behaviour_S.float(),
        )  # fmt: skip
        for what, mine in (("reason", again.reason_T), ("weight", again.weight_T)):
            off = (~torch.isclose(mine.double(), tensors[what].double(), rtol=1e-6)).nonzero().flatten().tolist()
            expect(not off, f"step {step.number}, rank {rank}: {what} of token {off[:1]} was "
                   f"{tensors[what][off[:1]].tolist()}, the gate says {mine[off[:1]].tolist()}")  # fmt: skip
        counts = torch.bincount(tensors["reason"].long(), minlength=len(gate.REASONS)).tolist()
        found = dict(zip(gate.REASONS, counts, strict=True))
        expect(found == line["ranks"][rank], f"step {step.number}, rank {rank}: decisions {found}, ledger "
               f"{line['ranks'][rank]}")  # fmt: skip
        totals.update(found)
        parts.append((again.keep_T, rollout_S, tensors["denominator"]))
    expect(totals["kept"] == line["trained"], f"step {step.number}: {totals['kept']} kept, ledger {line['trained']}")
    keep_S, rollout_S, divisor_S = map(torch.cat, zip(*parts, strict=True))
    for part in range(cfg.minibatches):
        mine_S = rollout_S % cfg.minibatches == part
        group_S, keep_s = group_N[rollout_S[mine_S]], keep_S[mine_S]
        kept_G = gate.kept_per_group(keep_s, group_S, int(group_N.max()) + 1)
        again = float(gate.denominator(cfg.denominator, keep_s, rollout_S[mine_S], group_S, cfg.denominator_constant,
                                       kept_G=kept_G, world_size=1))  # fmt: skip
        told = divisor_S[mine_S].unique().tolist()
        expect(all(abs(one - again) <= 1e-6 * again for one in told), f"step {step.number}, mini-batch {part}: "
               f"denominator {told}, the {cfg.denominator} rule gives {again}")  # fmt: skip


def check_logprobs(run: Run) -> Iterator[str]:
    """Score again whatever kept weights can; yields what was found for each version."""
    cfg = run.cfg
    kept = {0: Path(cfg.model)} if (Path(cfg.model) / "config.json").is_file() else {}
    saved = {int(path.name[5:]) * cfg.versions_per_step: path for path in run.path.glob("checkpoints/step-*")}
    for version, path in sorted((kept | saved).items()):
        steps = [step for step in run.steps if step.version >= version and step.version - version <= cfg.max_lag]
        if not steps:
            continue
        with tempfile.TemporaryDirectory() as folder:
            if version in saved:
                export(path, Path(folder))
                path = Path(folder)
            policy = rl.Policy(replace(cfg, model=str(path)), vars(torch)[cfg.dtype]).eval()
        worst = {"trainer": (0.0, ""), "engine": (0.0, "")}
        counts = Counter()
        for step in steps:
            for whose, difference, where in compare(policy, step, version):
                counts[whose] += 1
                worst[whose] = max(worst[whose], (difference, where))
        for whose, (difference, where) in worst.items():
            expect(difference <= cfg.probe_bound, f"version {version}: scored again, a log-prob differs by "
                   f"{difference:.3g} from the {whose}'s (probe_bound {cfg.probe_bound}): {where}")  # fmt: skip
        found = [f"{counts[whose]} of the {whose}'s log-probs within {worst[whose][0]:.1e}" for whose in worst]
        yield f"version {version}, scored again: {', '.join(found)}"


@torch.no_grad()
def compare(policy: rl.Policy, step: Step, version: int) -> Iterator[tuple[str, float, str]]:
    """Differences of a version's log-probs from the trainer's, if that was its version, and from the engine's.

    A row keeps the first route of a position: what a later version sampled after it was routed otherwise, so in a
    mixture of experts only the first version's tokens of a row can be compared with the engine.
    """
    replay = rl.make_replay(policy, step.cfg)
    told = {(*found["row"], at): found["logp"] for _, _, at, found in step.tokens()}
    for name, row in step.rows.items():
        versions = row.versions[row.sampled]
        if step.version != version and version not in versions:
            continue
        one = rl.pack([(row, 0)], policy.model.device)
        context, forward = rl.run(policy, one, replay)
        with context:
            again = forward().logp_S.tolist()
        for at, logp in zip(row.sampled.nonzero()[0].tolist(), again, strict=True):
            where = f"step {step.number}, row {row.row_id}, position {at}"
            if step.version == version:
                yield "trainer", abs(logp - told[*name, at]), where
            if row.versions[at] == version and (not row.experts.shape[1] or version == versions[0]):
                yield "engine", abs(logp - float(row.logprobs[at])), where


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.trace", description="Trace the tokens of a run that kept its rows."
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("--step", type=int, help="the step, counted from 1; without it the last")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--token", type=int, default=0, help="number of a sampled token of the step, from 0")
    what.add_argument("--rollout", help="a rollout's id: a line for each of its tokens")
    what.add_argument("--check", action="store_true", help="verify the whole run")
    asked = parser.parse_args()
    try:
        run = Run(asked.run)
        if asked.check:
            print(*check(run), sep="\n")
            return
        step, tokenizer = run.step(asked.step), AutoTokenizer.from_pretrained(run.cfg.model)
        print(table(step, asked.rollout, tokenizer) if asked.rollout else chain(step, asked.token, tokenizer))
    except (ValueError, OSError) as error:
        sys.exit(f"tools.trace: error: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main()
