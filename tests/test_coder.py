"""The sandbox against programs that mean harm, then the agent that runs a model's programs in it.

What two layers protect is tried with each of them alone; a layer that this system refuses is skipped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

import agents
from agents import children, coder
from agents.coder import Coder
from tools import sandbox
from tools.sandbox import Limits, Outcome, sandboxed

ALL = ()
NAMESPACES_ONLY = ("Landlock",)
LANDLOCK_ONLY = ("namespaces", "another user")
SLOW, QUICK = Limits(wall_s=30), Limits(wall_s=1.5)


def running(token: str) -> list[int]:
    """Processes whose command line has ``token``; a zombie has none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if token.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
        except OSError:  # it has ended meanwhile
            continue
    return found


@pytest.fixture(autouse=True)
def box(tmp_path, monkeypatch):
    """Programs run under a folder of the test's own, from which everything is gone after it, as are processes."""
    folder = tmp_path / "boxes"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(children, "CHILDREN", asyncio.Semaphore(8))
    monkeypatch.setattr(sandbox, "MISSING", {})
    yield str(folder)
    deadline = time.monotonic() + 10
    while left := running(str(folder)):
        assert time.monotonic() < deadline, f"still running: {left}"
        time.sleep(0.02)
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def refused() -> set[str]:
    """The parts that this system refuses."""
    children.CHILDREN, before = asyncio.Semaphore(1), children.CHILDREN
    asyncio.run(sandboxed({}, ["-c", ""]))
    children.CHILDREN = before
    return set(sandbox.MISSING)


@pytest.fixture
def without(request, refused, monkeypatch):
    """The parts that a test does without."""
    parts = getattr(request, "param", ALL)
    if refused - set(parts):
        pytest.skip(f"this system refuses {', '.join(refused)}")
    monkeypatch.setattr(sandbox, "MISSING", dict.fromkeys(parts, "by the test"))


either = pytest.mark.parametrize("without", [ALL, NAMESPACES_ONLY, LANDLOCK_ONLY], indirect=True, ids=str)
pytestmark = pytest.mark.usefixtures("without")


async def run(program: str, given: str = "", limits: Limits = SLOW) -> Outcome:
    """The outcome of a program, whose processes have the test's folder in their command lines."""
    return await sandboxed({"main.py": program}, ["main.py", tempfile.gettempdir()], given, limits)


def outcome(program: str, given: str = "", limits: Limits = SLOW) -> Outcome:
    began = time.monotonic()
    result = asyncio.run(asyncio.wait_for(run(program, given, limits), 60))
    assert time.monotonic() - began < limits.wall_s + 8, "the machine may be slow, but not that slow"
    return result


# ------------------------------------------------------------------------------------------------- good programs


def test_a_program_reads_its_input_imports_its_files_and_has_a_status():
    files = {
        "main.py": "import part.one\nprint(part.one.twice(input()))\nexit(3)",
        "part/one.py": "twice = '{0}{0}'.format",
    }
    assert asyncio.run(sandboxed(files, ["main.py"], "ab\n")) == Outcome("abab\n", "", 3, "")


def test_a_program_has_the_standard_library_a_folder_and_children():
    program = """
import decimal, json, math, os, random, subprocess, sys, tempfile, threading
open("a", "w").write("x")
with tempfile.TemporaryDirectory() as folder:
    os.rename("a", folder + "/b")
    print(open(folder + "/b").read(), os.listdir(), os.getcwd() == os.environ["HOME"])
thread = threading.Thread(target=print, args=["thread"])
thread.start()
thread.join()
open("/dev/null", "w").write("x")
print(len(open("/dev/urandom", "rb").read(4)))
print(subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True).stdout)
"""
    result = outcome(program)
    assert result.stdout.split("\n")[1:] == ["thread", "4", "1", "", ""], result
    assert result.stdout.startswith("x [") and result.stdout.split("\n")[0].endswith("] True") and result.status == 0


def test_no_package_is_at_hand():
    for package in ("pip", "pytest", "torch", "agents"):
        assert f"No module named '{package}'" in outcome(f"import {package}").stderr


@pytest.mark.parametrize(("program", "stdout", "status"), [
    (r"import os; os.write(1, b'\xff\xfe!\n')", "\ufffd\ufffd!\n", 0),
    ("import os, time; print(1, flush=True); os.close(1); os.close(2); time.sleep(0.3); os._exit(4)", "1\n", 4),
    ("import os; os.kill(os.getpid(), 11)", "", 128 + 11),
    ("import os; os.abort()", "", 128 + 6),
    ("raise SystemExit(255)", "", 255),
    ("print('\\ud800')", "", 1),
    ("\ud800", "", 1),
    ("\0", "", 1),
])  # fmt: skip
def test_odd_programs_have_an_outcome(program, stdout, status):
    result = outcome(program)
    assert (result.stdout, result.status, result.ended) == (stdout, status, "")


# -------------------------------------------------------------------------------------------- programs that take


def test_a_program_that_sleeps_for_ever_is_ended_and_what_it_printed_stays():
    result = outcome("import time\nprint('so far', flush=True)\ntime.sleep(1000)", limits=QUICK)
    assert (result.stdout, result.ended) == ("so far\n", "time limit")


def test_a_program_that_computes_for_ever_is_ended_by_the_time_it_computes():
    assert outcome("while True: pass", limits=Limits(cpu_s=1)).ended == "CPU limit"
    stubborn = "import signal\nsignal.signal(signal.SIGXCPU, signal.SIG_IGN)\nwhile True: pass"
    assert outcome(stubborn, limits=Limits(cpu_s=1)).status == 128 + 9


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_and_ends_the_program(stream):
    began = time.monotonic()
    result = outcome(
        f"import sys\nwhile True: sys.{stream}.write('x' * 999)",
        limits=Limits(wall_s=SLOW.wall_s, cpu_s=99, output_bytes=5000),
    )
    assert (len(getattr(result, stream)), result.ended) == (5000, "output limit")
    assert time.monotonic() - began < SLOW.wall_s / 2


def test_a_fork_bomb_has_few_processes_and_dies(box):
    """Not a true one: where nothing stops it, it stops at 256 processes."""
    most = 0

    async def go():
        nonlocal most
        program = "import os, time\nfor _ in range(8):\n try: os.fork()\n except OSError: 0\ntime.sleep(99)"
        bomb = asyncio.create_task(run(program, limits=QUICK))
        while not bomb.done():
            most = max(most, len(running(box)))
            await asyncio.sleep(0.05)
        return bomb.result()

    assert asyncio.run(go()).ended == "time limit"
    assert 40 < most <= 65, "the launcher's own is one more"


def test_memory_is_limited():
    result = outcome("x = bytearray(2**30)")
    assert result.status == 1 and result.stderr.endswith("MemoryError\n")
    assert outcome("x = bytearray(2**28)").status == 0


def test_files_are_limited_each_and_together():
    assert "File too large" in outcome("open('a', 'wb').write(bytes(2**25))").stderr
    several = "for i in range(9): open(str(i), 'wb').write(bytes(2**23))"
    assert "No space left" in outcome(several).stderr
    assert "No space left" in outcome("for i in range(10**4): open(str(i), 'w')").stderr
    assert "Too many open files" in outcome("kept = [open('a', 'w') for i in range(100)]").stderr


# ------------------------------------------------------------------------------------------- programs that get out

DAEMON = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        time.sleep(1000)
    os._exit(0)
os.wait()
print("left", flush=True)
"""


def test_a_daemon_dies_with_the_program_that_left_it():
    result = outcome(DAEMON)
    assert result == Outcome("left\n", "", 0, "")


def test_a_daemon_dies_with_the_program_that_is_ended(box):
    assert outcome(DAEMON + "time.sleep(1000)", limits=QUICK).ended == "time limit"


READS = """
import os, sys
for path in sys.stdin.read().split():
    try:
        print(path, os.listdir(path) if os.path.isdir(path) else open(path, "rb").read(9))
    except OSError:
        pass
"""


@either
def test_no_file_of_others_can_be_read(tmp_path, monkeypatch):
    ours = tmp_path / "secret"
    ours.write_text("secret")
    for folder in (tmp_path, *tmp_path.parents[:2]):
        folder.chmod(0o755)
    pid = os.getpid()
    paths = [ours, tmp_path, ROOT, ROOT / "agents/coder.py", ROOT / "pyproject.toml", Path.home() / ".profile",
             "/etc/passwd", f"/proc/{pid}/environ", f"/proc/{pid}/root/etc/passwd", "/proc/self/environ", "/proc",
             "/proc/self/fd", "/proc/1/cmdline", "/sys/kernel", "/dev/shm", "../order.json"]  # fmt: skip
    if "Landlock" not in sandbox.MISSING:  # it has a root of its own, without ours in it
        paths += ["/", "/etc", Path.home(), ".."]
    result = outcome(READS, "\n".join(map(str, paths)))
    assert (result.stdout, result.stderr, result.status) == ("", "", 0)
    assert "b'" in outcome(READS, os.__file__).stdout, "what may be read is"


WRITES = """
import os, sys
for path in sys.stdin.read().split():
    for make, undo in ((lambda: open(path, "x"), os.unlink), (lambda: os.mkdir(path), os.rmdir),
                       (lambda: os.symlink("a", path), os.unlink), (lambda: os.mkfifo(path), os.unlink)):
        try:
            make()
            undo(path)
            print("wrote", path)
        except OSError:
            pass
"""
"""It undoes what it can do, and touches nothing that is there: a test that fails leaves the machine as it was."""


@either
def test_nothing_can_be_written_outside_of_the_folder(tmp_path):
    ours = tmp_path / "ours"
    ours.write_text("kept")
    folders = [tmp_path, ROOT, sys.base_prefix, "/", "/usr", "/usr/lib", "/tmp", "/var/tmp", "/dev/shm", "/dev", "/run",
               Path.home(), ".."]  # fmt: skip
    result = outcome(WRITES, "\n".join(f"{folder}/instar-wrote-this" for folder in folders))
    assert (result.stdout, result.stderr, result.status) == ("", "", 0)
    harm = """
import os, sys
for harm in (lambda path: os.truncate(path, 0), os.unlink):
    try:
        harm(sys.argv[1] + "/../ours")
    except OSError:
        pass
"""
    assert outcome(harm).status == 0 and ours.read_text() == "kept"
    assert outcome(WRITES, "inside").stdout.count("wrote") == 4


@either
def test_no_network(without):
    program = """
import socket, sys
port = int(input())
for address in (("127.0.0.1", port), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 1)
        print("connected")
    except OSError as error:
        print(type(error).__name__)
"""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        socket.create_connection(("127.0.0.1", port)).close()
        result = outcome(program, str(port))
    assert result.status == 0 and "connected" not in result.stdout


@either
def test_no_process_of_others_can_be_signalled():
    program = """
import os
for pid in map(int, input().split()):
    try:
        os.kill(pid, 0)
        print("could have killed", pid)
    except OSError:
        pass
"""
    with subprocess.Popen(["sleep", "60"]) as other:  # not our parent: where that is pid 1, the program's own is, too
        result = outcome(program, f"{os.getpid()} {other.pid}")
        other.kill()
    assert (result.stdout, result.status) == ("", 0)


def test_its_own_first_process_cannot_be_ended_and_the_rest_ends_nothing_but_the_program():
    assert outcome("import os\nos.kill(1, 9)\nprint('still here')").stdout == "still here\n"
    assert outcome("import os\nos.killpg(0, 9)").status != 0


def test_no_privilege_is_left_nor_to_be_had():
    program = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
print(os.getuid() != 0, os.getgroups())
for flags in (0x10000000, 0x40000000, 0x00020000):
    print(libc.unshare(flags))
print(libc.mount(b"proc", b"/box", b"proc", 0, None), libc.chroot(b"."), libc.prctl(39, 0, 0, 0, 0))
"""
    assert outcome(program).stdout.split("\n")[1:5] == ["-1", "-1", "-1", "-1 -1 1"]
    assert outcome(program).stdout.startswith("True []") or os.getuid()


SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "OPENAI_API_KEY", "INSTAR_SECRET", "PYTHONSTARTUP")


def test_no_variable_of_ours_is_seen(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    seen = eval(outcome("import os; print(dict(os.environ))").stdout)
    assert seen.keys() == {"PATH", "HOME", "TMPDIR", "LANG"}


def test_an_external_program_sees_what_it_needs_of_our_variables_and_no_secret(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "hunter2")
    shown = {"LC_ALL": "C", "https_proxy": "http://p", "NO_PROXY": "*", "PYTHONPATH": "/p", "SSL_CERT_FILE": "/c"}
    for name, value in shown.items():
        monkeypatch.setenv(name, value)
    out, _, _ = asyncio.run(agents.run_program(["env", "-0"], b"", 60, {"OPENAI_API_KEY": "-"}))
    seen = dict(line.split("=", 1) for line in out.decode().strip("\0").split("\0"))
    assert seen.items() >= shown.items() and seen["PATH"] == os.environ["PATH"]
    assert "hunter2" not in seen.values() and seen["OPENAI_API_KEY"] == "-"


# -------------------------------------------------------------------------------------------- those who run them


def test_a_cancelled_caller_leaves_no_process_and_no_file(box):
    async def go(ticks: float):
        task = asyncio.create_task(run(DAEMON + "time.sleep(1000)"))
        await asyncio.sleep(ticks)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    for ticks in (0, 0.01, 0.05, 0.1, 0.5):
        asyncio.run(go(ticks))


def test_nothing_outlives_a_trainer_that_is_killed(box):
    """But the folder, which nobody is left to remove."""
    program = DAEMON + "time.sleep(1000)"
    trainer = f"""
import asyncio, sys, tempfile
sys.path.insert(0, {str(ROOT)!r})
from tools.sandbox import sandboxed
tempfile.tempdir = {box!r}
asyncio.run(sandboxed({{"main.py": {program!r}}}, ["main.py", {box!r}]))
"""
    with subprocess.Popen([sys.executable, "-c", trainer]) as trainer:
        deadline = time.monotonic() + 30
        while len(running(box)) < 5:  # trainer, launcher, first process, program, daemon
            assert time.monotonic() < deadline and trainer.poll() is None
            time.sleep(0.02)
        trainer.kill()
    shutil.rmtree(next(Path(box).iterdir()))


def test_eight_at_once_know_nothing_of_each_other():
    program = "import os, time\nopen('mine', 'w').write(n := input())\ntime.sleep(0.5)\nprint(n, open('mine').read())"

    async def go():
        return await asyncio.gather(*(run(program, str(n)) for n in range(8)))

    began = time.monotonic()
    assert [result.stdout for result in asyncio.run(go())] == [f"{n} {n}\n" for n in range(8)]
    assert time.monotonic() - began < 8 * 0.5 + 4


def test_no_more_run_at_once_than_there_are_places(monkeypatch, box):
    monkeypatch.setattr(children, "CHILDREN", asyncio.Semaphore(1))

    async def go():
        stuck, short = run("import time; time.sleep(1000)", limits=QUICK), run("print(1)")
        return await asyncio.gather(stuck, short)

    stuck, short = asyncio.run(go())
    assert stuck.ended == "time limit" and short.stdout == "1\n", "who waits for a place has all of its own time"


def launcher(monkeypatch, folder: Path, old: str, new: str) -> None:
    """The launcher, with something else in it."""
    text = sandbox.LAUNCHER.read_text()
    assert old in text
    (folder / "launcher.py").write_text(text.replace(old, new))
    monkeypatch.setattr(sandbox, "LAUNCHER", folder / "launcher.py")
    sandbox.warn.cache_clear()


@pytest.mark.parametrize(("part", "old", "new"), [
    ("Landlock", '"syscall", 444, None', '"syscall", 9999, None'),
    ("namespaces", 'call("unshare", NAMESPACES)', "raise PermissionError(1, 'not here')"),
    ("limits", "resource.setrlimit(kind", "raise PermissionError(1, 'not here')\n        (kind"),
])  # fmt: skip
def test_a_part_that_is_refused_is_done_without_and_said_once(part, old, new, monkeypatch, tmp_path, caplog):
    launcher(monkeypatch, tmp_path, old, new)

    async def go():
        return await asyncio.gather(*(run("print(1)") for _ in range(3)))

    with caplog.at_level(logging.WARNING):
        assert {result.stdout for result in asyncio.run(go())} == {"1\n"}
        assert outcome("print(2)").stdout == "2\n"
    [said] = caplog.records
    assert part in said.getMessage() and "\n" not in said.getMessage() and part in sandbox.MISSING
    assert sandbox.MISSING.keys() <= {part} | ({"another user"} if part == "namespaces" else set())


@pytest.mark.parametrize("new", ["raise MemoryError('why')", "raise OSError(24, 'why')"])
def test_another_error_before_the_program_is_no_outcome(new, monkeypatch, tmp_path):
    launcher(monkeypatch, tmp_path, 'call("unshare", NAMESPACES)', new)
    with pytest.raises(RuntimeError, match=r"cannot start a program: namespaces: .*why"):
        outcome("print(1)")
    assert not sandbox.MISSING


# ------------------------------------------------------------------------------------------------------ the agent

TASK = coder.task_of("a + b", 7)


def fenced(program: str) -> str:
    return f"So:\n```python\n{program}\n```\nThat is it."


def play(*replies: str, task: agents.Task = TASK, finish: str = "stop") -> tuple[agents.Result, list[str]]:
    """A rollout of a model that says these things, the last one for ever; its result and what it was told."""
    left, told = list(replies), []

    async def chat(messages, tools):
        told.append(messages[-1]["content"])
        message = {"role": "assistant", "content": left.pop(0) if len(left) > 1 else left[0]}
        return SimpleNamespace(message=message, finish_reason=finish)

    result = asyncio.run(asyncio.wait_for(Coder().run(task, SimpleNamespace(chat=chat)), 120))
    return result, told


RIGHT, WRONG = coder.solution(TASK), "print(input())"


def test_a_right_program_ends_the_rollout_at_once():
    result, told = play(fenced(RIGHT))
    assert (result.reward, result.terminated, result.truncated) == (1.0, True, False)
    assert told == ["f(a, b) = a + b + 7"] and result.rewards == [1.0] and result.info == {"turns": 1}


def test_a_wrong_program_is_shown_what_it_did_and_can_be_repaired():
    result, told = play(fenced(WRONG), fenced("1 / 0"), fenced(RIGHT))
    [[given, expected]] = TASK.data["examples"]
    assert (result.reward, result.rewards, result.info) == (1.0, [0.0, 0.0, 1.0], {"turns": 3})
    assert told[1] == f"input:\n{given}expected:\n{expected}output:\n{given.strip()}"
    assert told[2].startswith(f"input:\n{given}expected:\n{expected}output:\n\nerrors:\nTraceback")
    assert told[2].endswith("ZeroDivisionError: division by zero\nended by:\nstatus 1")


def test_a_program_that_is_never_right_earns_nothing():
    result, told = play(fenced(WRONG))
    assert (result.reward, result.terminated, result.truncated, len(told)) == (0.0, True, False, 3)


def test_outputs_are_cut(monkeypatch):
    monkeypatch.setattr(Coder, "max_turns", 2)
    _, told = play("import sys\nprint('o' * 9999)\nsys.exit('e' * 9999)")
    assert told[1].count("o" * coder.SHOWN) == 1 and "o" * (coder.SHOWN + 1) not in told[1]
    assert told[1].count("e" * (coder.SHOWN - 1)) == 1 and "e" * (coder.SHOWN + 1) not in told[1]


@pytest.mark.parametrize(("program", "ended"), [
    ("while True: print('x' * 999)", "output limit"), ("import time; time.sleep(99)", "time limit"),
])  # fmt: skip
def test_a_limit_is_told_and_no_crash(program, ended, monkeypatch):
    monkeypatch.setattr(Coder, "limits", QUICK)
    monkeypatch.setattr(Coder, "max_turns", 2)
    result, told = play(program)
    assert told[1].endswith(f"ended by:\n{ended}") and (result.reward, result.terminated) == (0.0, True)


def test_the_reward_is_the_share_of_hidden_tests():
    tests = [["1\n", "1\n"], ["2\n", "4\n"], ["3\n", "9\n"], ["2\n", "  4  \n\n"]]
    task = agents.Task("t", {"prompt": "square", "examples": [["2\n", "4\n"]], "tests": tests})
    assert play("print(int(input()) ** 2)", task=task)[0].reward == 1.0
    assert play("print(int(input()) * 2)", task=task)[0].reward == 0.5
    assert play("print(4)", task=task)[0].reward == 0.5, "the example's answer is worth what it is in the tests"
    assert play("print(4); exit(1)", task=task)[0].reward == 0.0, "a crash is no answer"


def test_the_examples_answer_is_no_answer_to_the_tests():
    [[_, expected]] = TASK.data["examples"]
    result, told = play(f"print({expected})")
    share = [said for _, said in TASK.data["tests"]].count(expected) / coder.TESTS
    assert (result.reward, len(told)) == (share, 1)


def test_a_reply_cut_by_length_truncates():
    assert play(RIGHT, finish="length")[0].truncated is True


@pytest.mark.parametrize(("text", "program"), [
    (None, ""), ("", ""), ("print(1)", "print(1)"), ("```python\na\n```", "a\n"), ("x\n```py\na\nb\n```\ny", "a\nb\n"),
    ("```python\na\n```\nbetter:\n```python\nb\n```\n```\nits output\n```", "b\n"), ("```python\na", "a"),
])  # fmt: skip
def test_the_program_of_a_message(text, program):
    assert coder.program_of(text) == program


def test_a_program_without_a_fence_is_one():
    assert play(RIGHT)[0].reward == 1.0


def test_no_expected_output_is_in_the_childs_reach():
    """A program that prints whatever it can read: environment, arguments, memory of its own, files, folders above."""
    answers = ["hunter2-one", "hunter2-two"]
    tests = [[f"{n}\n", f"{answer}\n"] for n, answer in enumerate(answers)]
    task = agents.Task("t", {"prompt": "p", "examples": [["0\n", "shown\n"]], "tests": tests})
    program = """
import gc, os, sys
found = [str(os.environ), str(sys.orig_argv), sys.stdin.read()]
found += [str(held) for held in gc.get_objects() if type(held) in (dict, list)]
for top in (".", "..", "/tmp", "/proc", "/dev/shm", "/work", "/root", "/home", "/var"):
    for folder, _, names in os.walk(top):
        for name in names:
            try:
                found.append(open(os.path.join(folder, name), errors="replace").read(10**5))
            except OSError:
                pass
text = "".join(found)
print("leaked" if any("-".join(["hunter2", n]) in text for n in ("one", "two")) else "nothing", file=sys.stderr)
"""
    seen = []
    real = coder.sandboxed

    async def watched(*args):
        seen.append(await real(*args))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(coder, "sandboxed", watched)
        result, _ = play(program, task=task)
    assert result.reward == 0.0 and {outcome.stderr for outcome in seen} == {"nothing\n"} and len(seen) == 4


def test_tasks_are_stable_and_the_splits_disjoint():
    train, held = list(islice(Coder.tasks("train", 3), 2000)), list(Coder.tasks("eval", 3))
    assert train == list(islice(Coder.tasks("train", 3), 2000)) != list(islice(Coder.tasks("train", 4), 2000))
    assert held == list(Coder.tasks("eval", 4)) and 50 < len({task.task_id for task in held}) == len(held) < 200
    assert not {task.task_id for task in train} & {task.task_id for task in held}
    assert json.loads(json.dumps(train[0].data)) == train[0].data and agents.load(str(ROOT / "agents/coder.py"))


@pytest.mark.parametrize("operation", coder.OPERATIONS)
def test_the_solution_of_a_task_is_right_and_short(operation):
    task = coder.task_of(operation, 12)
    assert len(task.data["prompt"] + coder.solution(task)) < 80
    assert all(given not in [case[0] for case in task.data["examples"]] for given, _ in task.data["tests"])
    assert play(coder.solution(task), task=task)[0].reward == 1.0
