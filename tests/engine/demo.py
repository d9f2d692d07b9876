#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The demo: two workers hold conversations over real text, sharing their prefixes through kvd; a third
process without a cache computes the same prompts, and every output is compared with its, bit by bit.

Run by scripts/demo, which builds everything first. Python's standard library only.
"""
import argparse
import json
import os
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

BEGIN, SYSTEM, USER, ASSISTANT, TOOL, END = range(256, 262)
TEXT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "text")
GENERATE = 24


def text(name):
    with open(os.path.join(TEXT, name), "rb") as f:
        return f.read()


def section(role, content):
    return [role, *content, END]


class Conversation:
    """A prompt as an agent keeps it: a list of messages, sent whole at every turn."""

    def __init__(self, *messages):
        self.messages = list(messages)

    def prompt(self):
        tokens = [BEGIN]
        for role, content in self.messages:
            tokens += section(role, content)
        return tokens + [ASSISTANT]


class Worker:
    def __init__(self, command, name):
        self.name = name
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        if self.process.stdout.readline().strip() != "ready":
            raise SystemExit(f"demo: {name} did not start: {' '.join(command)}")

    def run(self, path):
        self.process.stdin.write(f"run {path} {GENERATE}\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"demo: {self.name} ended in the middle of a turn")
        return json.loads(line)

    def close(self):
        self.process.stdin.close()
        return self.process.wait()


class Daemon:
    """kvd in a directory of its own. `stores`: where its spill stores are; None: it has none."""

    def __init__(self, build, directory, hugetlbfs, kv_part, snapshot, size=("32M", "32M"), stores=None):
        self.directory = directory
        self.hugetlbfs = hugetlbfs
        os.makedirs(directory, exist_ok=True)
        self.config = os.path.join(directory, "kvd.conf")
        self.socket = os.path.join(directory, "run", "kvd.sock")
        self.log = open(os.path.join(directory, "kvd.log"), "w", encoding="utf-8")
        with open(self.config, "w", encoding="utf-8") as f:
            f.write(
                f"[daemon]\nruntime_dir = {directory}/run\nhugepages = try\n"
                + (f"hugetlbfs = {hugetlbfs}\n" if hugetlbfs else "")
                + "\n[space demo]\nscheme = vllm-sha256-cbor\nseed = vllm-none-hash\n"
                "block_tokens = 16\nmodel = tests/engine hybrid\n\n"
                f"# K and V of 16 tokens, as two parts\n[pool demo/kv]\nslot = {2 * kv_part}\n"
                f"parts = 2\nsize = {size[0]}\n\n"
                f"# states of the linear-attention layers\n[pool demo/snapshots]\nslot = {snapshot}\n"
                f"size = {size[1]}\n\n[socket demo]\nrole = admin\n"
                + "".join(
                    f"\n[spill demo/{pool}/disk]\npath = {stores}/{pool}.spill\nsize = 64M\n"
                    for pool in ("kv", "snapshots") if stores
                )
            )
        self.process = subprocess.Popen(
            [os.path.join(build, "daemon", "kvd"), "-c", self.config], stderr=self.log
        )
        for _ in range(600):
            if os.path.exists(self.socket):
                return
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        with open(self.log.name, encoding="utf-8") as f:
            sys.stderr.write(f.read())
        raise SystemExit("demo: the daemon did not start")

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        self.process.wait()

    def lose_everything(self):
        """As when the power fails: the process and all its memory are gone."""
        self.process.kill()
        self.process.wait()
        names = [os.path.join(self.hugetlbfs, n) for n in os.listdir(self.hugetlbfs)
                 if n.startswith("kvd-")] if self.hugetlbfs else []
        for name in names:
            os.unlink(name)
        shutil.rmtree(os.path.join(self.directory, "run"))


def turns():
    """(who, what happens, conversation) one after the other; `answer` is appended by the caller."""
    a = Conversation(
        (SYSTEM, text("system_prompt.txt")),
        (USER, b"What is in the project, and why does the build fail? Look for yourself."),
    )
    yield "A", "first turn: nothing is cached yet", a
    a.messages += [(TOOL, text("tool_listing.txt"))]
    yield "A", "append a tool result", a
    a.messages += [(TOOL, text("tool_log.txt"))]
    yield "A", "append another", a
    b = Conversation(
        (SYSTEM, text("system_prompt.txt")),
        (USER, b"Summarise this passage in one sentence.\n\n" + text("alice.txt")),
    )
    yield "B", "another worker, same system prompt", b
    a.messages.append((USER, b"Thank you. Now fix the first error only, and show me the diff."))
    yield "A", "append a question", a
    yield "B", "worker B takes over A's conversation", a
    role, old = a.messages[3]
    a.messages[3] = (role, b"[the listing was removed to save room]\n")
    assert len(old) > 100
    yield "A", "edit in the middle: a stub for a tool result", a
    a.messages[0] = (SYSTEM, b"Be brief. " + a.messages[0][1])
    yield "A", "edit at the start", a
    yield "B", "nothing changed", a


def bar(result, width=34):
    """The prompt as a picture: reused, cached but computed again (no snapshot there), prefilled."""
    n = result["prompt"]
    promoted = round(width * result["promoted"] / n)
    reused = round(width * result["reused"] / n) - promoted
    again = round(width * max(0, result["cached"] - result["reused"]) / n)
    return ("#" * reused + "=" * promoted + "+" * again).ljust(width, ".")


HEAD = (f"\n{'turn':<4} {'worker':<6} {'prompt':>6} {'reused':>6} {'prefill':>7} {'ms':>7} "
        f"{'alone':>7}  {'# reused  = from NVMe  + no snapshot  . new':<46} output")


class Stage:
    """Workers on a daemon, one beside them that computes everything itself, and what is counted."""

    def __init__(self, args, directory):
        self.command = [os.path.join(args.build, "tests", "engine", "engine-worker")]
        self.directory = directory
        self.alone = Worker(self.command, "the worker without a cache")
        self.workers = {}
        self.number = self.same = self.different = self.saved = self.total = self.promoted = 0
        self.saved_ms = 0.0

    def attach(self, daemon, names):
        for name in names:
            self.workers[name] = Worker(
                [*self.command, "--socket", daemon.socket, "--space", "demo"], f"worker {name}"
            )

    def detach(self):
        for worker in self.workers.values():
            worker.close()
        self.workers = {}

    def turn(self, who, what, conversation):
        self.number += 1
        path = os.path.join(self.directory, f"prompt-{self.number}")
        prompt = conversation.prompt()
        with open(path, "wb") as f:
            f.write(struct.pack(f"<{len(prompt)}I", *prompt))
        got, want = self.workers[who].run(path), self.alone.run(path)
        equal = got["tokens"] == want["tokens"] and got["logits"] == want["logits"]
        self.same += equal
        self.different += not equal
        self.saved += got["reused"]
        self.promoted += got["promoted"]
        self.total += got["prompt"]
        self.saved_ms += want["prefill_ms"] - got["prefill_ms"]
        print(f"{self.number:<4} {who:<6} {got['prompt']:>6} {got['reused']:>6} {got['prefilled']:>7} "
              f"{got['prefill_ms']:>7.0f} {want['prefill_ms']:>7.0f}  [{bar(got)}]           "
              f"{'identical' if equal else 'DIFFERENT'}\n{'':>12}{what}", flush=True)
        conversation.messages.append((ASSISTANT, bytes(t for t in got["tokens"] if t < 256)))
        return got


def play(stage, daemon):
    stage.attach(daemon, "AB")
    print(HEAD)
    for who, what, conversation in turns():
        stage.turn(who, what, conversation)
    print(f"\n{stage.saved} of {stage.total} prompt tokens were not computed again; "
          f"{stage.saved_ms:.0f} ms of prefill saved.")


def play_disk(args, stage, make_daemon):
    """Pools that hold one conversation but not two, stores on the disk, and then everything else is lost."""
    kvctl = os.path.join(args.build, "client", "kvctl", "kvctl")
    a = Conversation((SYSTEM, text("system_prompt.txt")), (USER, text("tool_listing.txt")),
                     (USER, text("tool_log.txt")))
    b = Conversation((SYSTEM, b"Answer in verse."), (USER, text("alice.txt")))
    daemon = make_daemon()
    try:
        stage.attach(daemon, "AB")
        print("\nNow with pools too small for both conversations, and a spill store for each:\n" + HEAD)
        stage.turn("A", "A's conversation: nothing is cached yet", a)
        stage.turn("B", "B's, which pushes A's out of memory", b)
        a.messages.append((USER, b"Which of the errors is the first?"))
        stage.turn("A", "A goes on: its blocks come back from NVMe", a)
        for command in (["spill", "sync"], ["spill"]):
            print(f"\n$ kvctl {' '.join(command)}", flush=True)
            subprocess.run([kvctl, "-s", daemon.socket, *command], check=True)
        stage.detach()
        daemon.lose_everything()
        print("\nkill -9 of the daemon; its memory (hugepages, indexes, everything) is deleted; a new one "
              "starts.\n" + HEAD, flush=True)
        daemon = make_daemon()
        stage.attach(daemon, "A")
        a.messages.append((USER, b"And the second?"))
        last = stage.turn("A", "A goes on, all of it from NVMe", a)
        stage.detach()
    finally:
        daemon.stop()
    return last["reused"] > 0 and last["promoted"] == last["reused"]


def look_around(args, daemon):
    kvctl = os.path.join(args.build, "client", "kvctl", "kvctl")
    for command in (["pools"], ["sessions"]):
        print(f"\n$ kvctl {' '.join(command)}", flush=True)
        subprocess.run([kvctl, "-s", daemon.socket, *command], check=False)


def keep(args, daemon, directory):
    kvctl = os.path.join(args.build, "client", "kvctl", "kvctl")
    print(f"\nThe daemon is still up (pid {daemon.process.pid}). Look around:\n\n"
          f"    export KVD_SOCKET={daemon.socket}\n    {kvctl} status\n"
          f"    {kvctl} blocks demo/kv --limit 5\n    {kvctl} stats\n\n"
          f"Log: {daemon.log.name}\nCtrl-C ends it and removes {directory}.", flush=True)
    try:
        daemon.process.wait()
    except KeyboardInterrupt:
        pass


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build", required=True)
    parser.add_argument("--hugetlbfs", default="")
    parser.add_argument("--keep", action="store_true")
    args = parser.parse_args()
    worker = os.path.join(args.build, "tests", "engine", "engine-worker")
    part, snapshot = map(int, subprocess.check_output([worker, "--sizes"]).split())
    directory = tempfile.mkdtemp(prefix="kvd-demo-", dir="/dev/shm")
    disk = tempfile.mkdtemp(prefix="kvd-demo-", dir="/var/tmp")
    sizes = (-(-part // 4096) * 4096, -(-snapshot // 4096) * 4096)
    daemon = None
    try:
        stage = Stage(args, directory)
        daemon = Daemon(args.build, os.path.join(directory, "ram"), args.hugetlbfs, *sizes)
        play(stage, daemon)
        look_around(args, daemon)
        stage.detach()
        from_nvme = play_disk(args, stage, lambda: Daemon(
            args.build, os.path.join(directory, "disk"), args.hugetlbfs, *sizes, ("4M", "4M"), disk))
        stage.alone.close()
        if args.keep:
            keep(args, daemon, directory)
    finally:
        if daemon:
            daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)
        shutil.rmtree(disk, ignore_errors=True)
    print(f"\n{stage.promoted} tokens came back from NVMe" +
          ("" if from_nvme else ", but not those of the last turn: that is a fault"))
    print(f"demo: {stage.same} outputs identical, {stage.different} different")
    return 1 if stage.different or not stage.same or not from_nvme else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
