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
    def __init__(self, build, directory, hugetlbfs, kv_part, snapshot):
        self.directory = directory
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
                "parts = 2\nsize = 32M\n\n"
                f"# states of the linear-attention layers\n[pool demo/snapshots]\nslot = {snapshot}\n"
                "size = 32M\n\n[socket demo]\nrole = admin\n"
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
    reused = round(width * result["reused"] / n)
    again = round(width * max(0, result["cached"] - result["reused"]) / n)
    return "#" * reused + "+" * again + "." * (width - reused - again)


def play(args, daemon, directory):
    worker = os.path.join(args.build, "tests", "engine", "engine-worker")
    workers = {
        name: Worker([worker, "--socket", daemon.socket, "--space", "demo"], f"worker {name}")
        for name in "AB"
    }
    alone = Worker([worker], "the worker without a cache")
    same = different = saved_tokens = total = 0
    saved_ms = 0.0
    print(f"\n{'turn':<4} {'worker':<6} {'prompt':>6} {'reused':>6} {'prefill':>7} {'ms':>7} "
          f"{'alone':>7}  {'# reused  + cached, no snapshot  . new':<38} output")
    for number, (who, what, conversation) in enumerate(turns(), 1):
        path = os.path.join(directory, f"prompt-{number}")
        prompt = conversation.prompt()
        with open(path, "wb") as f:
            f.write(struct.pack(f"<{len(prompt)}I", *prompt))
        got, want = workers[who].run(path), alone.run(path)
        equal = got["tokens"] == want["tokens"] and got["logits"] == want["logits"]
        same += equal
        different += not equal
        saved_tokens += got["reused"]
        total += got["prompt"]
        saved_ms += want["prefill_ms"] - got["prefill_ms"]
        print(f"{number:<4} {who:<6} {got['prompt']:>6} {got['reused']:>6} {got['prefilled']:>7} "
              f"{got['prefill_ms']:>7.0f} {want['prefill_ms']:>7.0f}  [{bar(got)}]   "
              f"{'identical' if equal else 'DIFFERENT'}\n{'':>12}{what}")
        conversation.messages.append((ASSISTANT, bytes(t for t in got["tokens"] if t < 256)))
    print(f"\n{saved_tokens} of {total} prompt tokens were not computed again; "
          f"{saved_ms:.0f} ms of prefill saved.")
    return workers, alone, same, different


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
    daemon = None
    try:
        daemon = Daemon(args.build, directory, args.hugetlbfs, -(-part // 4096) * 4096,
                        -(-snapshot // 4096) * 4096)
        workers, alone, same, different = play(args, daemon, directory)
        look_around(args, daemon)
        for worker in (*workers.values(), alone):
            worker.close()
        if args.keep:
            keep(args, daemon, directory)
    finally:
        if daemon:
            daemon.stop()
        shutil.rmtree(directory, ignore_errors=True)
    print(f"\ndemo: {same} outputs identical, {different} different")
    return 1 if different or not same else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit("demo: interrupted")
