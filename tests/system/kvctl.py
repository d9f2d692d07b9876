#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""kvctl against a real daemon, and, where a real one cannot be brought to it, against a made-up one.

    kvctl.py KVD KVCTL [NAME...]

runs all tests, or those with a NAME in theirs, and ends with "N passed, N failed". Python 3 only. Some tests
change their user and need root; without it they say so and count neither way.
"""
import contextlib
import ctypes
import hashlib
import json
import os
import platform
import pty
import pwd
import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time

KVD, KVCTL = sys.argv[1:3] if len(sys.argv) > 2 else (None, None)
HERE = os.path.dirname(os.path.abspath(__file__))
NOBODY = 65534
GROUP = 54321  # of no name

OK, FAILED, USAGE, UNREACHABLE, UNHEALTHY, NOT_FOUND, REFUSED = range(7)

COMMANDS = ["status", "ping", "wait", "check", "spaces", "pools", "sessions", "blocks", "why", "stats", "keys",
            "config check", "evict", "flush", "kill", "spill", "spill status", "spill format", "spill scrub", "spill trim",
            "spill online", "spill offline", "spill sync", "spill stop", "completion", "version", "help"]

passed, failed, skipped = 0, 0, 0
current = ""


def check(what, good, detail=""):
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f"FAIL {current}: {what}\n    {str(detail).strip()[:2000]}")


def equal(what, got, wanted, detail=""):
    check(what, got == wanted, f"got {got!r}, wanted {wanted!r} {detail}")


def skip(why):
    global skipped
    skipped += 1
    print(f"skip {current}: {why}")


# ---- kvctl

class Result:
    def __init__(self, p):
        self.rc, self.out, self.err = p.returncode, p.stdout, p.stderr
        self.both = f"rc {self.rc}\n{self.out}{self.err}"

    def json(self):
        return json.loads(self.out)

    def rows(self):
        return [line.split() for line in self.out.splitlines()]


def kvctl(*args, env=None, **more):
    clean = {k: v for k, v in os.environ.items() if k not in ("KVD_SOCKET", "NO_COLOR")}
    clean.update(env or {})
    if "input" not in more:
        more.setdefault("stdin", subprocess.DEVNULL)  # a test run by hand has a terminal
    return Result(subprocess.run([KVCTL, *args], capture_output=True, text=True, errors="replace", env=clean,
                                 timeout=60, **more))


# ---- the protocol, as far as it is needed here

def varint(n):
    n &= (1 << 64) - 1
    out = bytearray()
    while n > 127:
        out.append(n & 127 | 128)
        n >>= 7
    return bytes(out + bytes([n]))


def message(*fields):
    """Of (number, value): a number, text, bytes, or a list of such."""
    out = b""
    for number, value in fields:
        for v in value if isinstance(value, list) else [value]:
            if isinstance(v, int):
                out += varint(number << 3) + varint(v)
            else:
                v = v.encode() if isinstance(v, str) else v
                out += varint(number << 3 | 2) + varint(len(v)) + v
    return out


def parse(data):
    """{number: [value, ...]}"""
    fields, at = {}, 0

    def take():
        nonlocal at
        n = shift = 0
        while True:
            byte = data[at]
            at += 1
            n |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return n

    while at < len(data):
        tag = take()
        value = take()
        if tag & 7 == 2:
            at += value
            value = data[at - value:at]
        fields.setdefault(tag >> 3, []).append(value)
    return fields


def zigzag(n):
    return n >> 1 ^ -(n & 1)


def receive(s):
    def exactly(n):
        data = b""
        while len(data) < n:
            more = s.recv(n - len(data))
            if not more:
                raise EOFError
            data += more
        return data
    return exactly(struct.unpack("<I", exactly(4))[0])


def send(s, data):
    s.sendall(struct.pack("<I", len(data)) + data)


class Worker:
    """A process of an engine, without shared memory."""

    def __init__(self, path, client="worker"):
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(30)
        self.socket.connect(path)
        self.id = 0
        hello = self.call(10, message((1, 1), (2, 1), (3, client)))
        self.session = hello[3][0]

    def call(self, body, data):
        self.id += 1
        send(self.socket, message((1, self.id), (body, data)))
        response = parse(parse(receive(self.socket))[1][0])
        status = zigzag(response[2][0])
        if status < 0:
            raise OSError(-status, response.get(3, [b""])[0].decode())
        return parse(response[body][0]) if body in response else {}

    @staticmethod
    def key(name, group=0):
        return message((1, name), (2, group))

    def reserve(self, names, tenant=0, pool=0):
        reply = self.call(34, message((1, pool), (2, 1), (3, [self.key(n) for n in names]), (6, tenant)))
        return [parse(r) for r in reply[1]]

    def put(self, names, tenant=0, pool=0, data=b"x" * 100):
        for n, r in zip(names, self.reserve(names, tenant, pool)):
            self.call(35, message((1, r[2][0]), (2, 0), (3, 0), (4, data), (5, pool)))
            meta = message((1, 4096), (3, tenant))
            self.call(36, message((1, pool), (2, r[2][0]), (3, 0), (4, len(data)), (5, meta)))

    def pin(self, names, pool=0):
        return self.call(31, message((1, pool), (2, 1), (3, [self.key(n) for n in names])))[1][0]

    def close(self):
        self.socket.close()


class Fake:
    """Says whatever one wants it to say."""

    def __init__(self, path, daemon="kvd 0.1.0", status=None, sessions=None, silent=False, spill=None, more=None):
        self.daemon, self.status, self.sessions, self.silent = daemon, status, sessions, silent
        self.spill, self.more = spill, more or {}  # FakeStores; {field: function of the parsed body}
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.bind(path)
        self.socket.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=self.talk, args=(self.socket.accept()[0],), daemon=True).start()

    def talk(self, s):
        with contextlib.suppress(EOFError, OSError), s:
            while True:
                request = parse(receive(s))
                if self.silent and 10 not in request:
                    continue
                send(s, message((1, self.answer(request))))

    def answer(self, request):
        head = ((1, request[1][0]), (2, 0))
        if 10 in request:
            hello = message((1, 1), (2, b"i" * 16), (3, 7), (5, 3), (9, self.daemon))
            return message(*head, (10, hello))
        if 50 in request and self.status is not None:
            return message(*head, (50, self.status))
        if 51 in request and self.sessions is not None:
            return message(*head, (51, self.sessions))
        if 58 in request and self.spill is not None:
            error, answer = self.spill.answer(parse(request[58][0]))
            if error:
                return message(head[0], (2, 2 * error - 1), (3, answer))
            return message(*head, (58, answer))
        for field, function in self.more.items():
            if field in request:
                return message(*head, (field, function(parse(request[field][0]))))
        if 11 in request:
            return message(*head)
        return message((1, request[1][0]), (2, 2 * 38 - 1), (3, "not known"))  # -ENOSYS

    def close(self):
        self.socket.shutdown(socket.SHUT_RDWR)  # or the thread might accept what comes to the descriptor's next owner
        self.thread.join()
        self.socket.close()


STATUS, FORMAT, SCRUB, TRIM, ONLINE, OFFLINE, SYNC, STOP = range(8)


class FakeStores:
    """Stores whose tasks take so many looks at them, and end as they should."""

    def __init__(self, *stores, looks=2, ends=(0, "12 objects read, none is broken"), refuse=None, late=0):
        self.late, self.waiting = late, []  # looks before a task begins; (store, action) until then
        self.stores, self.looks, self.ends, self.refuse = {x["name"]: x for x in stores}, looks, ends, refuse
        self.asked = []  # (action, store, force, rate) of all but STATUS
        self.seen = 0    # answers to STATUS

    def answer(self, q):
        action, store = q.get(1, [STATUS])[0], q.get(2, [b""])[0].decode()
        mine = [x for x in self.stores.values() if store in ("", x["name"])]
        if action == STATUS:
            self.seen += 1
            self.late -= bool(self.waiting)
            while self.waiting and self.late <= 0:
                self.begin(*self.waiting.pop())
            for x in mine:
                self.go_on(x)
        elif self.refuse:
            return self.refuse
        else:
            self.asked.append((action, store, bool(q.get(3, [0])[0]), q.get(4, [None])[0]))
            for x in mine:
                if self.late and action in (FORMAT, ONLINE):
                    x["state"] = "offline"
                    self.waiting.append((x, action))
                else:
                    self.begin(x, action)
        return 0, message((1, [fake_store(**x) for x in mine]))

    def begin(self, x, action):
        name = {FORMAT: "format", SCRUB: "scrub", TRIM: "trim", ONLINE: "open", SYNC: "sync"}.get(action)
        if name:
            unit = "objects" if action in (SCRUB, SYNC) else "bytes"
            x["task"] = dict(name=name, done=0, total=self.looks << 20, unit=unit, running=True)
        elif action == OFFLINE:
            x["state"] = "offline"

    def go_on(self, x):
        task = x.get("task")
        if not task or not task["running"]:
            return
        task["done"] += 1 << 20
        if task["done"] >= task["total"]:
            task.update(running=False, status=self.ends[0], result=self.ends[1])
            if task["name"] in ("open", "format") and not self.ends[0]:
                x["state"] = "online"


def fake_task(name, done, total, unit, running, result=None, status=None):
    more = [(6, result)] if result else []
    more += [(7, varint_zigzag(status))] if status is not None else []
    return message((1, name), (2, done), (3, total), (4, unit), (5, int(running)), *more)


def varint_zigzag(n):
    return n << 1 if n >= 0 else (-n << 1) - 1


def fake_store(name="demo/kv/a", path="/dev/fake", state="online", task=None, **more):
    numbers = dict(problem=4, fix=5, io=6, note=7, bytes=8, records=9, used=10, queued=11, writing=12, reading=13,
                   written_bytes=14, read_bytes=15, errors=16, epoch=17, admission=18, bandwidth=20)
    fields = [(1, name), (2, path), (3, state), *((numbers[k], v) for k, v in more.items())]
    return message(*fields, *([(19, fake_task(**task))] if task else []))


FULL = dict(name="demo/kv/a", path="/dev/fake", io="io_uring, registered buffers", bytes=3 << 30, records=1000, used=250,
            queued=7, writing=2, reading=1, written_bytes=5 << 20, read_bytes=0, errors=0, epoch=1, admission="all",
            bandwidth=0)
DEAD = dict(name="demo/kv/b", path="/dev/dead", state="offline", problem="10 errors in a row: Input/output error",
            fix="kvctl spill online demo/kv/b")


def fake_pool(free=0, live=100, pinned=0, reserved=0, quarantined=0, backing="tmpfs", page=4096):
    info = message((1, 0), (2, "kv"), (3, 100), (4, 65536), (5, 1), (6, 100), (7, 1), (8, page), (9, backing),
                   (10, "demo"))
    return message((1, info), (2, free), (3, reserved), (4, live), (5, 0), (6, quarantined), (7, pinned), (8, 0),
                   (9, 0))


def fake_status(*pools, state="ready", problems=(), version="0.1.0", hugepages="off", sockets=()):
    space = message((1, "demo"), (2, 1), (5, 1), (6, 1))
    return message((1, version), (2, 4711), (3, 3725), (4, state), (5, list(problems)), (6, space), (7, list(pools)),
                   (8, list(sockets)), (9, 1), (10, 1), (11, "/dev/shm/nothing"), (12, hugepages))


def fake_session(number, state="attached", objects=0, size=0, oldest=0, note=None, client="engine"):
    fields = [(1, number), (2, 1000 + number), (3, 0), (4, "writer"), (5, client), (6, state), (7, 10), (8, objects),
              (9, size), (10, 0), (11, oldest), (13, "demo")]
    return message(*fields, *([(14, note)] if note else []))


# ---- daemons

class Place:
    """A folder, and what is started in it."""

    def __init__(self):
        self.dir = tempfile.mkdtemp(prefix="kvctl-", dir="/dev/shm")
        os.chmod(self.dir, 0o755)
        self.processes, self.closing = [], []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for thing in self.closing:
            thing.close()
        for p in self.processes:
            with contextlib.suppress(ProcessLookupError):
                p.send_signal(signal.SIGCONT)
            p.terminate()
            p.wait()
        shutil.rmtree(self.dir)

    def path(self, name):
        return os.path.join(self.dir, name)

    def write(self, name, text):
        path = self.path(name.lstrip("/"))
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb" if isinstance(text, bytes) else "w") as f:
            f.write(text)
        return path

    def config(self, daemon="", pool="slot = 64K\nslots = 256", sockets="", spaces="[space demo]"):
        run = self.path("run")
        sockets = sockets or f"[socket all]\npath = {run}/kvd.sock\nrole = admin"
        return self.write("kvd.conf", f"[daemon]\nruntime_dir = {run}\n{daemon or 'hugepages = off'}\n{spaces}\n"
                                      f"[pool demo/kv]\n{pool}\n{sockets.replace('RUN', run)}\n")

    def daemon(self, **config):
        path = self.config(**config)
        log = open(self.path("log"), "w")
        p = subprocess.Popen([KVD, "-c", path], stderr=log)
        log.close()
        self.processes.append(p)
        self.socket = self.path("run/kvd.sock")
        r = kvctl("-s", self.socket, "wait", "--ready", "--timeout", "30")
        if r.rc:
            raise RuntimeError(f"no daemon: {r.both}\n{open(self.path('log')).read()}")
        return p

    def kvctl(self, *args, **more):
        return kvctl("-s", self.socket, *args, **more)

    def worker(self, client="worker"):
        w = Worker(self.socket, client)
        self.closing.append(w)
        return w

    def fake(self, *args, **more):
        self.socket = self.path("fake.sock")
        f = Fake(self.socket, *args, **more)
        self.closing.append(f)
        return f


def names(n, first=0):
    return [hashlib.sha256(b"%d" % i).digest() for i in range(first, first + n)]


def by_item(result):
    items = {}
    for i in result.json()["items"]:
        items.setdefault(i["item"], []).append((i["level"], i["text"], i.get("fix", [])))
    return items


# ---- usage

def test_usage():
    equal("nothing", kvctl().rc, USAGE)
    r = kvctl("--help")
    equal("--help", r.rc, OK)
    for name in COMMANDS:
        check(f"--help lists {name}", re.search(rf"^  {name}\b", r.out, re.M), r.out)
        one = kvctl(*name.split(), "--help")
        check(f"{name} --help has an example", one.rc == OK and "\nExample:\n  " in one.out, one.both)
        equal(f"help {name}", kvctl("help", *name.split()).out, one.out)
    for status in range(7):
        check(f"exit status {status} is explained", re.search(rf"^  {status}  ", r.out, re.M))
    check("--version", re.fullmatch(r"kvctl \d+\.\d+\.\d+\n", kvctl("--version").out))


def test_wrong_usage():
    for args, wanted in [
        (["statsu"], 'did you mean "status"'), (["sesions"], 'did you mean "sessions"'),
        (["conf"], 'did you mean "config check"'), (["config"], 'did you mean "config check"'),
        (["xyzzy"], "kvctl --help"), (["blocks"], "too few"), (["ping", "x"], "too many"), (["blocks", "-x", "p"], '"-x"'),
        (["--foo"], '"--foo"'), (["stats", "-i"], '"-i"'), (["-o", "xml", "ping"], "xml"),
        (["--timeout", "0", "ping"], "seconds"), (["--timeout", "1x", "ping"], "seconds"),
        (["--timeout", "nan", "ping"], "seconds"), (["why", "a/b", "abc"], "even number"),
        (["why", "a/b", "gg"], "hexadecimal"), (["why", "a/b", "00" * 33], "2 to 64"), (["why", "a/b", "00:x"], "group"),
        (["kill", "x"], "whole number"), (["evict", "a/b"], "one of the three"),
        (["evict", "a/b", "00", "--count", "1"], "one of the three"), (["blocks", "a/b", "-a", "-n", "1"], "exclude"),
        (["spill", "frmat"], 'did you mean "spill format"'), (["spill", "xyzzy"], "spill --help"),
        (["spill", "format"], "too few"), (["spill", "scrub", "a", "b"], "too many"),
        (["spill", "scrub", "--rate", "fast"], "--rate"), (["spill", "scrub", "--rate", "1X"], "--rate"),
        (["spill", "scrub", "--rate", "99999999999T"], "--rate"), (["spill", "stop", "--no-wait"], "--no-wait"),
        (["spill", "format", "a/b/c", "--force"], "--yes"), (["blocks", "a/b", "--tier", "disk"], "ram or nvme"),
        (["completion", "fish"], "bash and zsh"),
        (["stats", "--count", "1"], "--interval"), (["stats", "--openmetrics", "-o", "json"], "--openmetrics"),
    ]:
        r = kvctl(*args)
        check(f"{args} is wrong usage", r.rc == USAGE and wanted in r.err and r.err.startswith("kvctl: ") and not r.out,
              r.both)


# ---- without a daemon

def test_no_daemon():
    with Place() as p:
        missing = p.path("none.sock")
        for args in [["status"], ["ping"], ["pools"], ["stats"], ["kill", "1"], ["flush", "demo"]]:
            r = kvctl("-s", missing, *args)
            check(f"{args}: unreachable", r.rc == UNREACHABLE and missing in r.err, r.both)
        r = kvctl("-s", missing, "wait", "--timeout", "0.2")
        check("wait gives up", r.rc == UNREACHABLE and "0.2 s" in r.err, r.both)
        equal("version knows its own", kvctl("-s", missing, "version").rc, OK)
        r = kvctl("ping", env={"KVD_SOCKET": missing})
        check("$KVD_SOCKET", missing in r.err, r.both)
        r = kvctl("-s", p.path("other.sock"), "ping", env={"KVD_SOCKET": missing})
        check("-s is stronger", "other.sock" in r.err, r.both)
        r = kvctl("-s", "/" + "x" * 200, "ping")
        check("a long path", r.rc == FAILED and "107" in r.err, r.both)


def test_check_without_daemon():
    with Place() as p:
        r = kvctl("-s", p.path("none.sock"), "check", "-o", "json")
        items = by_item(r)
        equal("exit status", r.rc, UNHEALTHY)
        equal("healthy", r.json()["healthy"], False)
        level, text, fix = items["daemon"][0]
        check("names the socket and the cure", level == "FAIL" and "none.sock" in text and "start kvd" in fix[0], items)
        check("looks at the machine all the same", {"kernel", "pidfd", "hugepages", "memlock"} <= items.keys(), items)

        s = socket.socket(socket.AF_UNIX)
        s.bind(p.path("stale.sock"))
        s.close()
        items = by_item(kvctl("-s", p.path("stale.sock"), "check", "-o", "json"))
        level, text, fix = items["daemon"][0]
        check("a stale socket", level == "FAIL" and "left over" in text and "restart kvd" in fix[0], items)
        equal("ping of it", kvctl("-s", p.path("stale.sock"), "ping").rc, UNREACHABLE)

        r = kvctl("-s", p.path("none.sock"), "check")
        check("as text", re.search(r"^FAIL  daemon .*\n +fix: ", r.out, re.M), r.out)


# ---- looking

def test_status():
    with Place() as p:
        p.daemon()
        r = p.kvctl("status")
        check("table", r.rc == OK and "ready" in r.out and "demo/kv" in r.out and "64 KiB" in r.out, r.both)
        s = p.kvctl("-o", "json", "status").json()
        equal("schema", s["schema"], 1)
        equal("state", s["state"], "ready")
        equal("pid", s["pid"], p.processes[0].pid)
        pool = s["pools"][0]
        equal("pool", (pool["name"], pool["slot_bytes"], pool["slots"], pool["bytes"], pool["free"]),
              ("demo/kv", 65536, 256, 256 * 65536, 256))
        equal("socket", (s["sockets"][0]["path"], s["sockets"][0]["role"]), (p.socket, "admin"))
        equal("options may stand behind", p.kvctl("status", "-o", "json").json()["pools"], s["pools"])
        equal("and be repeated", p.kvctl("-o", "json", "pools", "-o", "table").rows()[0][0], "POOL")
        for command in COMMANDS[:11]:
            if command in ("status", "ping", "spaces", "pools", "sessions", "stats", "check"):
                equal(f"schema of {command}", p.kvctl(command, "-o", "json").json()["schema"], 1)
        equal("headers", p.kvctl("pools").rows()[0][0], "POOL")
        equal("no headers", p.kvctl("pools", "--no-headers").rows()[0][0], "demo/kv")
        r = p.kvctl("ping")
        check("ping", re.fullmatch(rf"kvd \S+ at {re.escape(p.socket)}: \d+ us\n", r.out), r.both)
        check("version", "kvd " in p.kvctl("version").out)
        equal("wait", p.kvctl("wait").rc, OK)
        check("kvctl says good-bye", "is dead" not in open(p.path("log")).read(), open(p.path("log")).read())


def test_sessions():
    with Place() as p:
        p.daemon()
        w = p.worker(client="bad\x1b[31mname")
        w.put(names(3))
        equal("pinned", w.pin(names(3)), 3)
        rows = {s["session"]: s for s in p.kvctl("sessions", "-o", "json").json()["sessions"]}
        s = rows[w.session]
        equal("what it holds", (s["pinned_objects"], s["pid"], s["spaces"], s["state"]),
              (3, os.getpid(), ["demo"], "attached"))
        check("this command", any(s.get("note") == "this command" for s in rows.values()), rows)
        r = p.kvctl("sessions")
        check("no escape sequences reach the terminal", "\x1b" not in r.out and "name" in r.out, repr(r.out))
        check("sizes for people", re.search(r"\b(KiB|B)\b", r.out), r.out)


def test_blocks():
    with Place() as p:
        p.daemon(daemon="hugepages = off\nmax_frame = 64K\nmax_inline = 32K")  # several messages for the listing
        equal("an empty pool", p.kvctl("blocks", "demo/kv", "-o", "json").json()["blocks"], [])
        w = p.worker()
        w.put(names(200), tenant=5)
        b = p.kvctl("blocks", "demo/kv", "-o", "json").json()
        equal("the limit", (len(b["blocks"]), b["more"], b["pool"]), (100, True, "demo/kv"))
        b = p.kvctl("blocks", "demo/kv", "-n", "7", "-o", "json").json()
        equal("another limit", len(b["blocks"]), 7)
        b = p.kvctl("blocks", "0", "--all", "-o", "json").json()
        equal("all, by number", sorted(x["key"] for x in b["blocks"]), sorted(n.hex() for n in names(200)))
        equal("more", b["more"], False)
        x = b["blocks"][0]
        equal("one", (x["state"], x["bytes"], x["tenant"], x["position"], x["pins"]), ("live", 100, 5, 4096, 0))
        r = p.kvctl("blocks", "demo/kv", "-n", "3")
        check("table", len(r.out.splitlines()) == 4 and "--all" in r.err and names(1)[0].hex() in r.out, r.both)
        r = p.kvctl("blocks", "demo/kw")
        check("a pool that is not there", r.rc == NOT_FOUND and "demo/kv" in r.err, r.both)
        equal("nor is this", p.kvctl("blocks", "9").rc, NOT_FOUND)


def test_why():
    with Place() as p:
        p.daemon()
        w = p.worker()
        a, b, c, d = names(4)
        w.put([a])
        w.reserve([b])
        ticket = w.reserve([c])[0][2][0]
        w.call(37, message((1, 0), (2, ticket)))
        r = p.kvctl("why", "demo/kv", a.hex(), "-o", "json")
        equal("present", (r.rc, r.json()["state"], r.json()["block"]["bytes"]), (OK, "present", 100))
        check("in words", "present" in p.kvctl("why", "demo/kv", a.hex().upper()).out)
        r = p.kvctl("why", "demo/kv", b.hex(), "-o", "json")
        equal("pending", (r.rc, r.json()["state"], r.json()["block"]["session"]), (OK, "pending", w.session))
        r = p.kvctl("why", "demo/kv", c.hex(), "-o", "json")
        equal("aborted", (r.rc, r.json()["state"]), (NOT_FOUND, "aborted"))
        r = p.kvctl("why", "demo/kv", d.hex(), "-o", "json")
        equal("never stored", (r.rc, r.json()["state"]), (NOT_FOUND, "never stored"))
        equal("another group is another key", p.kvctl("why", "demo/kv", a.hex() + ":1").rc, NOT_FOUND)
        equal("group 0 is none", p.kvctl("why", "demo/kv", a.hex() + ":0").rc, OK)
        for name, shown in [(b"\1" * 8, 16), (b"\1" * 9, 32), (b"\1" * 16, 32), (b"\1" * 17, 64),
                            (b"\1" * 31 + b"\0", 64)]:
            w.put([name])
            key = p.kvctl("why", "demo/kv", name.hex(), "-o", "json").json()["key"]
            equal(f"{len(name)} bytes", key, name.hex().ljust(shown, "0"))
        w.put([b"\xab\xcd"])
        r = p.kvctl("why", "demo/kv", "abcd", "-o", "json")
        equal("a short key is padded", (r.rc, r.json()["key"]), (OK, "abcd000000000000"))
        equal("and found as it is shown", p.kvctl("why", "demo/kv", r.json()["name"]).rc, OK)


def test_stats():
    with Place() as p:
        p.daemon()
        w = p.worker()
        w.put(names(5))
        s = p.kvctl("stats", "-o", "json").json()["stats"]
        value = {x["name"]: x["value"] for x in s}
        equal("committed", value["kvd_committed_objects_total"], 5)
        equal("types", {x["type"] for x in s}, {"counter", "gauge"})
        equal("of one pool", {x["pool"] for x in p.kvctl("stats", "demo/kv", "-o", "json").json()["stats"]}, {"demo/kv"})
        check("table", "kvd_slots_live" in p.kvctl("stats").out)
        lines = p.kvctl("stats", "-i", "0.05", "-n", "3", "-o", "json").out.splitlines()
        samples = [json.loads(line)["stats"] for line in lines]
        equal("three documents", len(samples), 3)
        check("the first has no rate", not any("rate" in x for x in samples[0]))
        check("the next have, counters only", all(("rate" in x) == (x["type"] == "counter") for x in samples[1]),
              samples[1])
        r = p.kvctl("stats", "demo/kv", "-i", "0.05", "-n", "2")
        equal("RATE in the second table", [line for line in r.out.splitlines() if "RATE" in line and "NAME" in line],
              [line for line in r.out.splitlines() if line.startswith("NAME")][1:])


def test_openmetrics():
    """What https://prometheus.io/docs/specs/om/open_metrics_spec/ demands."""
    with Place() as p:
        p.daemon(spaces="[space demo]\n[pool demo/more]\nslot = 4K\nslots = 16")
        out = p.kvctl("stats", "--openmetrics").out
        check("ends with # EOF", out.endswith("\n# EOF\n"), out[-80:])
        families, family, kind, seen = [], None, None, set()
        for line in out.splitlines()[:-1]:
            if line.startswith("# TYPE "):
                _, _, family, kind = line.split()
                families.append(family)
                continue
            if line.startswith("# HELP "):
                equal("help belongs to its family", line.split()[2], family)
                continue
            m = re.fullmatch(r'(kvd_[a-z_]+)(\{[a-z]+="[^"]*"(?:,[a-z]+="[^"]*")*\})? (\d+)', line)
            check("a sample", m, line)
            equal("of its family", m[1], family + ("_total" if kind == "counter" else ""))
            check("once", m[1] + (m[2] or "") not in seen, line)
            seen.add(m[1] + (m[2] or ""))
        equal("a family is declared once", [f for f in set(families) if families.count(f) > 1], [])
        check("labels", 'kvd_slots_free{pool="demo/kv",tier="ram"} 256' in out.splitlines(), out)


# ---- acting

def test_evict_keys():
    with Place() as p:
        p.daemon(daemon="hugepages = off\nmax_frame = 64K\nmax_inline = 32K")
        w = p.worker()
        keys = [n.hex() for n in names(4)]
        w.put(names(4))
        w.pin(names(1))
        r = p.kvctl("evict", "demo/kv", keys[1], keys[2], "-o", "json")
        equal("two", (r.rc, r.json()["removed"]), (OK, 2))
        equal("removed", p.kvctl("why", "demo/kv", keys[1], "-o", "json").json()["state"], "removed")
        r = p.kvctl("evict", "demo/kv", keys[0])
        check("a pinned one stays", r.rc == FAILED and "pinned" in r.err, r.both)
        w.put(names(1, 50))
        r = p.kvctl("evict", "demo/kv", keys[1], names(1, 50)[0].hex())
        check("one of two is not there", r.rc == NOT_FOUND and "1 of 2" in r.err and "1 removed" in r.out, r.both)
        many = [n.hex() for n in names(3000, 1000)]
        r = p.kvctl("evict", "demo/kv", *many, keys[3])
        check("more keys than a message takes", r.rc == NOT_FOUND and "3000 of 3001" in r.err, r.both[:300])


def test_evict_coldest_and_tenant():
    with Place() as p:
        p.daemon()
        w = p.worker()
        w.put(names(10), tenant=1)
        w.put(names(20, 100), tenant=2)
        r = p.kvctl("evict", "demo/kv", "--count", "4", "-o", "json")
        equal("the coldest", (r.rc, r.json()["removed"]), (OK, 4))
        equal("are the first", p.kvctl("why", "demo/kv", names(1)[0].hex()).rc, NOT_FOUND)
        r = p.kvctl("evict", "demo/kv", "--tenant", "2", "-o", "json")
        equal("a tenant", r.json()["removed"], 20)
        equal("others stay", len(p.kvctl("blocks", "demo/kv", "-o", "json").json()["blocks"]), 6)
        r = p.kvctl("evict", "demo/kv", "--count", "100")
        check("more than there are", r.rc == OK and "6 removed" in r.out and "no more" in r.err, r.both)
        equal("tenant 0 is one too", p.kvctl("evict", "demo/kv", "--tenant", "0").rc, OK)


def test_flush():
    with Place() as p:  # two pools, one of which takes several steps
        p.daemon(pool="slot = 4K\nslots = 10000",
                 spaces="[space other]\n[pool other/kv]\nslot = 4K\nslots = 16\n"
                        "[space demo]\n[pool demo/more]\nslot = 4K\nslots = 16")
        pools = {x["name"]: x["pool"] for x in p.kvctl("pools", "-o", "json").json()["pools"]}
        w = p.worker()
        for first in range(0, 5000, 500):
            w.put(names(500, first), pool=pools["demo/kv"])
        w.put(names(3), pool=pools["demo/more"])
        w.put(names(3), pool=pools["other/kv"])
        w.pin(names(2), pool=pools["demo/kv"])
        r = p.kvctl("flush", "demo", "-o", "json")
        result = {x["pool"]: (x["removed"], x["pinned"]) for x in r.json()["pools"]}
        equal("the space's pools", result, {"demo/kv": (4998, 2), "demo/more": (3, 0)})
        live = {x["name"]: x["live"] for x in p.kvctl("pools", "-o", "json").json()["pools"]}
        equal("and no other", live, {"demo/kv": 2, "demo/more": 0, "other/kv": 3})
        r = p.kvctl("flush", "dmeo")
        check("a space that is not there", r.rc == NOT_FOUND and "demo" in r.err, r.both)
        r = p.kvctl("flush", "other")
        check("in words", r.out == "other/kv: 3 removed\n", r.both)


def victim(path):
    """Another process with a session: its pid and number."""
    r, w = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(Exception):
            worker = Worker(path, "victim")
            os.write(w, str(worker.session).encode())
            time.sleep(600)
        os._exit(1)
    os.close(w)
    with open(r) as f:
        session = os.read(f.fileno(), 16).decode()
    return pid, session


def test_kill():
    with Place() as p:
        p.daemon()
        pid, session = victim(p.socket)
        r = p.kvctl("kill", session)
        check("says whom", r.rc == OK and f"pid {pid}" in r.out, r.both)
        if r.rc:
            os.kill(pid, signal.SIGTERM)
        equal("SIGKILL", os.WTERMSIG(os.waitpid(pid, 0)[1]), signal.SIGKILL)
        equal("a session that is not there", p.kvctl("kill", "4000000").rc, NOT_FOUND)
        own = max(s["session"] for s in p.kvctl("sessions", "-o", "json").json()["sessions"])
        r = p.kvctl("kill", str(own + 1))
        check("not itself", r.rc == USAGE and "itself" in r.err, r.both)


# ---- the NVMe tier, of a made-up daemon

def test_spill_status():
    with Place() as p:
        p.fake(spill=FakeStores(dict(FULL)))
        r = p.kvctl("spill")
        check("table", r.rc == OK and r.rows()[0][:2] == ["STORE", "STATE"] and r.rows()[1][:2] == ["demo/kv/a", "online"],
              r.both)
        check("numbers for people", "3 GiB" in r.out and "5 MiB" in r.out and "io_uring, registered buffers" in r.out, r.out)
        equal("spill status is the same", p.kvctl("spill", "status").out, r.out)
        equal("of one", p.kvctl("spill", "status", "demo/kv/a").out, r.out)
        equal("no headers", p.kvctl("spill", "--no-headers").rows()[0][0], "demo/kv/a")
        s = p.kvctl("spill", "status", "-o", "json").json()
        equal("schema", s["schema"], 1)
        equal("all of it", s["stores"], [{**FULL, "state": "online"}])
        r = p.kvctl("spill", "status", "demo/kv/q")
        check("one that is not there", r.rc == NOT_FOUND and "did you mean demo/kv/a" in r.err, r.both)
    with Place() as p:
        p.fake(spill=FakeStores(dict(FULL), dict(DEAD, note="slow because; fix: this")))
        r = p.kvctl("spill")
        check("an offline one", r.rc == UNHEALTHY and "problem: demo/kv/b is offline: 10 errors in a row: Input/output "
              "error; fix: kvctl spill online demo/kv/b\n" in r.out, r.both)
        check("what could be better", "note: demo/kv/b could be better: slow because" in r.out, r.out)
        s = p.kvctl("spill", "-o", "json").json()["stores"][1]
        equal("as JSON", (s["state"], s["fix"], "bytes" in s), ("offline", DEAD["fix"], False))
        equal("the other one is well", p.kvctl("spill", "status", "demo/kv/a").rc, OK)
    for state, problem, rc in [("read-only", None, UNHEALTHY), ("waiting", None, UNHEALTHY), ("waiting", "for long", UNHEALTHY),
                               ("online", "for a while", UNHEALTHY), ("reading", None, OK), ("something new", None, OK)]:
        with Place() as p:
            p.fake(spill=FakeStores(dict(FULL, state=state, **({"problem": problem} if problem else {}))))
            equal(f"{state}, {problem}", p.kvctl("spill").rc, rc)
    with Place() as p:
        p.fake(spill=FakeStores(dict(FULL, state="waiting", problem="another daemon has it", fix="end that one")))
        r = p.kvctl("spill")
        check("waiting, with the fix", "problem: demo/kv/a is waiting: another daemon has it; fix: end that one\n" in r.out, r.both)
    with Place() as p:
        p.fake(spill=FakeStores())
        r = p.kvctl("spill")
        check("none", r.rc == OK and not r.out and "[spill SPACE/POOL/NAME]" in r.err, r.both)
        r = p.kvctl("spill", "scrub", "a/b/c")
        check("none to scrub", r.rc == NOT_FOUND and "none" in r.err, r.both)
    with Place() as p:
        p.fake()
        r = p.kvctl("spill")
        check("a daemon that knows no stores", r.rc == FAILED and "not known" in r.err, r.both)
    with Place() as p:
        p.fake(spill=FakeStores(dict(DEAD, name="a/b/\x1b[2J", problem="x\x1b]0;b\x07\ny")))
        for args in [["spill"], ["spill", "online"], ["status"], ["check"]]:
            r = p.kvctl(*args)
            check(f"{args}: no control characters", not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", r.out + r.err), repr(r.both))


def test_spill_task_column():
    for task, shown in [(dict(name="scrub", done=45, total=100, unit="objects", running=True), "scrub 45 %"),
                        (dict(name="format", done=0, total=0, unit="bytes", running=True), "format "),
                        (dict(name="trim", done=5, total=5, unit="bytes", running=False, status=0), "trim done"),
                        (dict(name="sync", done=5, total=5, unit="objects", running=False, status=-30), "sync failed"),
                        (dict(name="scrub", done=5, total=9, unit="objects", running=False, status=-125, result="asked for"),
                         "scrub stopped"),
                        (dict(name="scrub", done=5, total=9, unit="objects", running=False, status=-5, result="gone"),
                         "scrub failed")]:
        with Place() as p:
            p.fake(spill=FakeStores(dict(FULL, task=task), looks=1 << 20))
            p.closing[0].spill.go_on = lambda x: None
            r = p.kvctl("spill")
            check(shown, "TASK" in r.out and shown in r.out, r.out)
            t = p.kvctl("spill", "-o", "json").json()["stores"][0]["task"]
            equal("as JSON", (t["name"], t["done"], t["total"], t["running"], t.get("status")),
                  (task["name"], task["done"], task["total"], task["running"], task.get("status")))
            equal("why it failed", "problem: demo/kv/a (scrub failed): gone" in r.out, task.get("result") == "gone", r.out)
    with Place() as p:
        p.fake(spill=FakeStores(dict(FULL, task=dict(name="open", done=5, total=5, unit="bytes", running=False, status=0))))
        check("that it was opened is no news", "TASK" not in p.kvctl("spill").out)


def errand(*args, **more):
    """(Result, what the daemon was asked, how often for the state) of `kvctl spill ARGS` on one store."""
    with Place() as p:
        stores = FakeStores(dict(FULL, state=more.pop("state", "online"), **more.pop("store", {})), **more)
        p.fake(spill=stores)
        return p.kvctl("spill", *args), stores.asked, stores.seen


def test_spill_actions():
    r, asked, seen = errand("scrub", "demo/kv/a", "--rate", "200M")
    equal("scrub", (r.rc, r.out, r.err), (OK, "demo/kv/a: scrub: 12 objects read, none is broken\n", ""))
    equal("what was asked", asked, [(SCRUB, "demo/kv/a", False, 200 << 20)])
    equal("it has looked until the end", seen, 1 + 2)
    r, asked, seen = errand("scrub", "--no-wait")
    equal("without waiting", (r.rc, r.out, asked, seen),
          (OK, "demo/kv/a: scrub has begun\n", [(SCRUB, "demo/kv/a", False, None)], 2), r.both)
    r, _, _ = errand("scrub", "-o", "json")
    equal("as JSON", (r.json()["schema"], r.json()["action"], r.json()["stores"][0]["task"]["status"]), (1, "scrub", 0))
    r, asked, _ = errand("scrub", "--rate", "512", ends=(-5, "at byte 4096: Input/output error"))
    check("that fails", r.rc == FAILED and "kvctl: demo/kv/a: scrub: at byte 4096" in r.err and not r.out, r.both)
    equal("a rate in bytes", asked[0][3], 512)
    r, _, _ = errand("trim", ends=(-95, None))
    check("that fails without a word", r.rc == FAILED and "not supported" in r.err, r.both)
    r, asked, _ = errand("trim", "demo/kv/a", ends=(0, None))
    equal("trim", (r.rc, r.out, asked), (OK, "demo/kv/a: trim: done\n", [(TRIM, "demo/kv/a", False, None)]))
    r, asked, _ = errand("sync", ends=(0, None))
    equal("sync", (r.rc, r.out, asked), (OK, "demo/kv/a: sync: done\n", [(SYNC, "demo/kv/a", False, None)]))
    r, asked, _ = errand("online", "demo/kv/a", state="offline", ends=(0, None))
    equal("online", (r.rc, r.out, asked), (OK, "demo/kv/a: online\n", [(ONLINE, "demo/kv/a", False, None)]))
    r, _, _ = errand("online", state="offline", ends=(-16, "in use by another program"), store=dict(fix="unmount it"))
    check("online fails", r.rc == FAILED and "demo/kv/a: open: in use by another program; fix: unmount it" in r.err, r.both)
    r, asked, seen = errand("offline", "demo/kv/a")
    equal("offline", (r.rc, r.out, asked, seen), (OK, "demo/kv/a: offline\n", [(OFFLINE, "demo/kv/a", False, None)], 2))
    r, asked, seen = errand("stop", store=dict(task=dict(name="scrub", done=1, total=9 << 30, unit="objects", running=True)))
    equal("stop does not wait", (r.rc, asked, seen), (OK, [(STOP, "demo/kv/a", False, None)], 2), r.both)
    equal("says so", r.out, "demo/kv/a: the scrub is stopped\n")
    r, asked, _ = errand("stop")
    check("nothing to stop", r.rc == OK and not asked and "nothing to stop" in r.err, r.both)
    r, _, seen = errand("online", state="offline", late=3, ends=(0, None))
    equal("what begins late is waited for", (r.rc, r.out), (OK, "demo/kv/a: online\n"), r.both)
    r, _, seen = errand("format", "demo/kv/a", late=3)
    equal("a format as well", (r.rc, r.out), (OK, "demo/kv/a: format: 12 objects read, none is broken\n"), r.both)
    r, _, _ = errand("scrub", state="offline")
    equal("of one that is offline", r.rc, UNHEALTHY, r.both)
    for verb in ["scrub", "trim", "sync"]:
        r, _, _ = errand(verb, state="offline", refuse=(19, "it is offline"))
        check(f"{verb} of one that is offline, refused", r.rc == UNHEALTHY and "it is offline" in r.err, r.both)
    r, _, _ = errand("sync", state="offline", ends=(-30, "it is offline: nothing can be written to it"))
    check("sync that is not", r.rc == UNHEALTHY and "nothing can be written" in r.err and not r.out, r.both)
    r, asked, _ = errand("scrub", refuse=(16, "a format runs; wait"))
    check("refused", r.rc == FAILED and "a format runs; wait" in r.err, r.both)
    r, asked, _ = errand("scrub", refuse=(1, "needs role admin"))
    check("not allowed", r.rc == REFUSED and "admin" in r.err, r.both)
    old = dict(name="scrub", done=1, total=9, unit="objects", running=False, status=-5, result="old")
    r, _, _ = errand("offline", store=dict(task=old))
    equal("an old failure is not ours", r.rc, OK, r.both)
    r, asked, _ = errand("format", "demo/kv/a")
    equal("format", (r.rc, r.out, asked), (OK, "demo/kv/a: format: 12 objects read, none is broken\n",
                                           [(FORMAT, "demo/kv/a", False, None)]), r.both)
    r, asked, _ = errand("format", "demo/kv/a", "--force", "--yes")
    equal("format by force", (r.rc, asked), (OK, [(FORMAT, "demo/kv/a", True, None)]), r.both)
    r, asked, _ = errand("format", "demo/kv/x", "--yes")
    equal("format of another one", (r.rc, asked), (NOT_FOUND, []), r.both)
    with Place() as p:
        stores = FakeStores(dict(FULL), dict(FULL, name="demo/kv/b"), dict(FULL, name="demo/kv/c", state="offline"))
        refuse = stores.answer
        stores.answer = lambda q: (16, "it is not online") if q[1] != [STATUS] and q[2] == [b"demo/kv/c"] else refuse(q)
        p.fake(spill=stores)
        r = p.kvctl("spill", "sync")
        check("several, one of which refuses", r.rc == UNHEALTHY and "it is not online" in r.err, r.both)
        equal("does not keep the others from it", [x.split()[0] for x in r.out.splitlines()], ["demo/kv/a:", "demo/kv/b:"])
    with Place() as p:
        stores = FakeStores(dict(FULL), looks=1 << 30)
        p.fake(spill=stores)
        begun = subprocess.Popen([KVCTL, "-s", p.socket, "spill", "scrub"], stderr=subprocess.PIPE, text=True)
        while stores.seen < 3:
            time.sleep(0.01)
        stores.answer = lambda q: (107, "the daemon is going")
        err = begun.communicate(timeout=60)[1]
        check("a daemon that goes meanwhile", begun.returncode in (FAILED, UNREACHABLE), (begun.returncode, err))


def test_spill_on_terminal():
    with Place() as p:
        stores = FakeStores(dict(FULL), looks=4, ends=(0, "done with it"))
        p.fake(spill=stores)
        args = ["-s", p.socket, "spill", "format", "demo/kv/a"]
        for answer in (b"n\n", b"\n", b"yess\n", b"\x04"):
            out, rc = on_terminal_with(answer, *args)
            equal(f"{answer}", (rc, stores.asked), (FAILED, []), out)
            check("says what would be lost", "demo/kv/a is /dev/fake (3 GiB), with 250 objects" in out and
                  "nothing was formatted" in out, out)
        out, rc = on_terminal_with(b"y\n", *args, "--force")
        equal("y", (rc, stores.asked), (OK, [(FORMAT, "demo/kv/a", True, None)]), out)
        check("warns of force", "whatever else is there" in out, out)
        check("progress", "demo/kv/a: format: 50 % (2 MiB of 4 MiB)" in out and "done with it" in out, out)
        stores.asked.clear()
        out, rc = on_terminal_with(b"", *args, "--yes")
        check("--yes asks nothing", rc == OK and "[y/N]" not in out and stores.asked == [(FORMAT, "demo/kv/a", False, None)],
              out)
        out, rc = on_terminal_with(b"", "-s", p.socket, "spill", "scrub", "-o", "json")
        check("no progress in JSON", rc == OK and " % (" not in out, out)


def test_stores_elsewhere():
    """status, pools and check know of stores, too."""
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50, live=50)), spill=FakeStores(dict(FULL), dict(DEAD)))
        r = p.kvctl("status")
        equal("said once", r.out.count("10 errors in a row"), 1, r.both)
        check("status", "demo/kv/a" in r.out and "problem: demo/kv/b is offline" in r.out and
              "; fix: kvctl spill online demo/kv/b" in r.out, r.both)
        equal("as JSON", [x["name"] for x in p.kvctl("status", "-o", "json").json()["stores"]], ["demo/kv/a", "demo/kv/b"])
        r = p.kvctl("pools")
        check("pools", "STORED" in r.rows()[0] and "250" in r.rows()[1], r.out)
        equal("as JSON", p.kvctl("pools", "-o", "json").json()["pools"][0]["stored"], 250)
        r = p.kvctl("check", "-o", "json")
        level, text, fix = by_item(r)["stores"][0]
        check("check", r.rc == UNHEALTHY and level == "FAIL" and "demo/kv/b (/dev/dead) is offline: 10 errors" in text and
              fix == ["kvctl spill online demo/kv/b"], (level, text, fix))
    for store, level, text, fix in [
            (dict(FULL), "ok", "1 online", None),
            (dict(FULL, state="reading", task=dict(name="open", done=1 << 29, total=1 << 31, unit="bytes", running=True)),
             "warn", "not in use yet: reading, ", "spill status demo/kv/a"),
            (dict(FULL, state="waiting"), "FAIL", "(/dev/fake) is waiting", "wait, or end the other daemon"),
            (dict(FULL, state="read-only", problem="No space left on device"), "FAIL", "read-only: No space",
             "spill online demo/kv/a"),
            (dict(FULL, errors=3), "warn", "has had 3 errors", "spill scrub demo/kv/a"),
            (dict(FULL, note="io_uring is denied (seccomp); fix: another profile"), "warn", "io_uring is denied (seccomp)",
             "another profile")]:
        with Place() as p:
            p.fake(status=fake_status(fake_pool(free=50)), spill=FakeStores(store, looks=1 << 30))
            r = p.kvctl("check", "-o", "json")
            got = by_item(r)["stores"]
            check(f"check: {text}", len(got) == 1 and got[0][0] == level and text in got[0][1] and
                  (fix in got[0][2][0] if fix else not got[0][2]), got)
            equal("exit status", r.rc, UNHEALTHY if level == "FAIL" else OK, r.both)
    with Place() as p:
        said = "store demo/kv/b is offline: broken; fix: do this"
        p.fake(status=fake_status(fake_pool(free=50), state="degraded", problems=[said]), spill=FakeStores(dict(DEAD)))
        items = by_item(p.kvctl("check", "-o", "json"))
        equal("nor by status", p.kvctl("status").out.count("is offline"), 1)
        check("what the daemon says itself is not said twice", len(items["problem"]) == 1 and "stores" not in items, items)
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50)), spill=FakeStores())
        check("without stores check says nothing of them", "stores" not in by_item(p.kvctl("check", "-o", "json")))
        check("nor status", "STORE" not in p.kvctl("status").out)
        check("nor pools", "STORED" not in p.kvctl("pools").out)


def test_objects_in_stores():
    block = message((1, 77), (2, message((1, b"\xab" * 32))), (3, "stored"), (4, 4096), (5, 0), (7, 1), (11, "demo/kv/a"))
    live = message((1, 3), (2, message((1, b"\xcd" * 32))), (3, "live"), (4, 4096), (5, 0), (11, "demo/kv/a"))
    asked = []

    def blocks(q):
        asked.append(q.get(4, [None])[0])
        return message((1, [block if asked[-1] == b"nvme" else live]))
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50)),
               more={52: blocks, 53: lambda q: message((1, "present"), (4, block if b"\xab" in q[2][0] else live))})
        r = p.kvctl("blocks", "demo/kv", "--tier", "nvme")
        check("blocks", r.rc == OK and r.rows()[0][:3] == ["STORE", "RECORD", "BYTES"] and
              r.rows()[1] == ["demo/kv/a", "77", "4", "KiB", "1", "ab" * 32], r.both)
        s = p.kvctl("blocks", "demo/kv", "--tier", "nvme", "-o", "json").json()
        equal("as JSON", (s["tier"], s["blocks"][0]["store"], s["blocks"][0]["slot"]), ("nvme", "demo/kv/a", 77))
        r = p.kvctl("blocks", "demo/kv")
        check("which of the pool have a copy", r.rows()[0][-2:] == ["STORE", "KEY"] and "demo/kv/a" in r.out, r.both)
        equal("what was asked", asked, [b"nvme", b"nvme", b"ram"])
        for key, tier in [("ab" * 32, "nvme"), ("cd" * 32, "ram")]:
            r = p.kvctl("why", "demo/kv", key)
            number = {"nvme": "record +77", "ram": "slot +3"}[tier]
            check(f"why {tier}: its place", re.search(rf"^{number}$", r.out, re.M) and "because" not in r.out, r.both)
            check(f"why {tier}", r.rc == OK and re.search(rf"^tier +{tier}$", r.out, re.M) and
                  re.search(r"^store +demo/kv/a$", r.out, re.M), r.both)
            equal("as JSON", p.kvctl("why", "demo/kv", key, "-o", "json").json()["tier"], tier)


def test_stats_of_tiers():
    rounds = []

    def stats(_):
        rounds.append(1)
        return message((1, [message((1, "kvd_read_bytes_total"), (2, 100 * len(rounds) * n), (3, "demo/kv"), (6, tier))
                            for tier, n in (("ram", 1), ("nvme", 5))]))
    with Place() as p:
        p.fake(more={54: stats})
        r = p.kvctl("stats")
        check("a column for the tier", r.rows()[0][:3] == ["NAME", "POOL", "TIER"] and
              [x[2] for x in r.rows()[1:]] == ["ram", "nvme"], r.both)
        equal("labels", [x for x in p.kvctl("stats", "--openmetrics").out.splitlines() if "{" in x],
              [f'kvd_read_bytes_total{{pool="demo/kv",tier="{t}"}} {n}' for t, n in (("ram", 200), ("nvme", 1000))])
        last = json.loads(p.kvctl("stats", "-i", "0.05", "-n", "2", "-o", "json").out.splitlines()[-1])["stats"]
        check("rates", len(last) == 2 and all(x["rate"] > 0 for x in last), last)


# ---- the NVMe tier, of a real daemon

class Stored(Place):
    """A daemon with a store; `able` is false when it knows none."""

    def __enter__(self):
        self.disk = tempfile.mkdtemp(prefix="kvctl-store-", dir="/tmp")
        os.chmod(self.disk, 0o755)
        self.daemon(spaces=f"[space demo]\n[spill demo/kv/a]\npath = {self.disk}/a\nsize = 32M")
        self.able = bool(self.kvctl("spill", "-o", "json").rc == OK and self.stores())
        return self

    def __exit__(self, *why):
        super().__exit__(*why)
        shutil.rmtree(self.disk)

    def stores(self):
        return self.kvctl("spill", "-o", "json").json()["stores"]


def test_real_store():
    with Stored() as p:
        if not p.able:
            return skip("this daemon has no NVMe tier")
        w = p.worker()
        w.put(names(20), tenant=5)
        r = p.kvctl("spill", "sync")
        check("sync", r.rc == OK and r.out.startswith("demo/kv/a: "), r.both)
        s = p.stores()[0]
        equal("all are there", (s["state"], s["used"], s["queued"], s["path"]), ("online", 20, 0, p.disk + "/a"), s)
        check("written", s["written_bytes"] >= 20 * 4096 and s["records"] > 16 * 20 and s["bytes"] == 32 << 20, s)
        equal("pools", p.kvctl("pools", "-o", "json").json()["pools"][0]["stored"], 20)
        check("status", "demo/kv/a" in p.kvctl("status").out)
        equal("check", by_item(p.kvctl("check", "-o", "json"))["stores"][0][0] in ("ok", "warn"), True)
        b = p.kvctl("blocks", "demo/kv", "--tier", "nvme", "--all", "-o", "json").json()
        equal("blocks", (sorted(x["key"] for x in b["blocks"]), b["more"]), (sorted(n.hex() for n in names(20)), False))
        equal("of the store", {x["store"] for x in b["blocks"]}, {"demo/kv/a"})
        equal("in steps", len(p.kvctl("blocks", "demo/kv", "--tier", "nvme", "-n", "7", "-o", "json").json()["blocks"]), 7)
        check("a tier of its own in stats", '"nvme"' in p.kvctl("stats", "-o", "json").out)
        equal("evict from memory", p.kvctl("evict", "demo/kv", "-n", "20").rc, OK)
        r = p.kvctl("why", "demo/kv", names(1)[0].hex(), "-o", "json")
        equal("why", (r.rc, r.json().get("tier"), r.json().get("block", {}).get("store")), (OK, "nvme", "demo/kv/a"), r.both)
        equal("scrub", p.kvctl("spill", "scrub").rc, OK)
        r = p.kvctl("spill", "trim")
        check("trim", r.rc == OK or "not supported" in r.err, r.both)
        equal("a slow scrub", p.kvctl("spill", "scrub", "--rate", "1", "--no-wait").rc, OK)
        equal("runs", p.stores()[0]["task"]["running"], True)
        r = p.kvctl("spill", "trim")
        check("one thing at a time", r.rc == FAILED and "running" in r.err, r.both)
        r = p.kvctl("spill", "stop")
        equal("and is stopped", (r.rc, r.out, p.stores()[0]["task"]["running"]),
              (OK, "demo/kv/a: the scrub is stopped\n", False), r.both)
        equal("nothing to stop", p.kvctl("spill", "stop").rc, OK)
        equal("of one", p.kvctl("spill", "stop", "demo/kv/a").rc, NOT_FOUND)


def test_real_store_goes_and_comes():
    with Stored() as p:
        if not p.able:
            return skip("this daemon has no NVMe tier")
        p.worker().put(names(20))
        p.kvctl("spill", "sync")
        equal("offline", p.kvctl("spill", "offline", "demo/kv/a").rc, OK)
        r = p.kvctl("spill")
        check("is told", r.rc == UNHEALTHY and "offline" in r.out, r.both)
        check("with its fix", "kvctl spill online demo/kv/a" in r.out, r.out)
        r = p.kvctl("check", "-o", "json")
        check("by check, too", r.rc == UNHEALTHY and "demo/kv/a" in r.out, r.both)
        equal("online", p.kvctl("spill", "online", "demo/kv/a").rc, OK)
        equal("and all are there", p.stores()[0]["used"], 20)
        equal("twice does no harm", p.kvctl("spill", "online").rc, OK)
        r = p.kvctl("spill", "format", "demo/kv/a", stdin=subprocess.DEVNULL)
        check("format does not lose objects without force", r.rc == FAILED and "--force" in r.both, r.both)
        equal("nothing is lost", p.stores()[0]["used"], 20)
        equal("nothing is left in memory", p.kvctl("flush", "demo").rc, OK)
        equal("format", p.kvctl("spill", "format", "demo/kv/a", "--force", "--yes").rc, OK)
        equal("all are gone", (p.stores()[0]["state"], p.stores()[0]["used"]), ("online", 0))


def test_real_store_is_no_file_of_others():
    with Stored() as p:
        if not p.able:
            return skip("this daemon has no NVMe tier")
        p.processes.pop().kill()
        path = p.write("kvd2.conf", open(p.path("kvd.conf")).read().replace(p.disk + "/a", p.disk + "/foreign"))
        with open(p.disk + "/foreign", "wb") as f:
            f.write(b"somebody's letters\n" * 1000)
        with open(p.path("log"), "w") as log:
            p.processes.append(subprocess.Popen([KVD, "-c", path], stderr=log))
        equal("it serves all the same", p.kvctl("wait", "--ready", "--timeout", "30").rc, OK)
        r = p.kvctl("spill")
        check("refused, with the fix", r.rc == UNHEALTHY and "kvctl spill format" in r.out, r.both)
        equal("said once", r.out.count("problem: "), 1, r.both)
        equal("format without force", p.kvctl("spill", "format", "demo/kv/a", "--yes").rc, FAILED)
        check("has changed nothing", open(p.disk + "/foreign", "rb").read(19) == b"somebody's letters\n")
        r = p.kvctl("spill", "format", "demo/kv/a", "--force", "--yes")
        equal("with force", (r.rc, p.stores()[0]["state"]), (OK, "online"), r.both)


def test_real_store_roles():
    with Place() as p:
        p.disk = p.path("disk")
        os.mkdir(p.disk)
        p.daemon(spaces=f"[space demo]\n[spill demo/kv/a]\npath = {p.disk}/a\nsize = 32M",
                 sockets="[socket a]\npath = RUN/kvd.sock\nrole = admin\n[socket r]\npath = RUN/r.sock\nrole = reader")
        if p.kvctl("spill").rc == FAILED:
            return skip("this daemon has no NVMe tier")
        for args in [["format", "demo/kv/a"], ["scrub"], ["trim"], ["online"], ["offline"], ["sync"], ["stop", "demo/kv/a"]]:
            r = kvctl("-s", p.path("run/r.sock"), "spill", *args)
            check(f"a reader may not {args[0]}", r.rc == REFUSED and "admin" in r.err, r.both)


# ---- completion

def complete(script, *words, env=None):
    """What bash would offer for the last word."""
    shell = f"""PATH={os.path.dirname(os.path.abspath(KVCTL))}:$PATH; source {script}
COMP_WORDS=({' '.join("'" + w + "'" for w in words)}); COMP_CWORD={len(words) - 1}; _kvctl; printf '%s\\n' "${{COMPREPLY[@]}}" """
    return subprocess.run(["bash", "-c", shell], capture_output=True, text=True, env={**os.environ, **(env or {})},
                          timeout=60).stdout.split()


def test_completion():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50)), spill=FakeStores(dict(FULL), dict(DEAD)))
        script = p.write("completion", kvctl("completion", "bash").out)
        commands = complete(script, "kvctl", "")
        equal("commands", sorted(commands), sorted({c.split()[0] for c in COMMANDS}))
        equal("beginning", complete(script, "kvctl", "sp"), ["spaces", "spill"])
        equal("second words", sorted(complete(script, "kvctl", "spill", "")),
              sorted(c.split()[1] for c in COMMANDS if c.startswith("spill ")))
        equal("tiers", complete(script, "kvctl", "blocks", "demo/kv", "--tier", ""), ["ram", "nvme"])
        equal("one of them", complete(script, "kvctl", "blocks", "--tier", "n"), ["nvme"])
        equal("behind an option", complete(script, "kvctl", "-o", "json", "config", ""), ["check"])
        check("options", {"--rate", "--no-wait", "--socket"} <= set(complete(script, "kvctl", "spill", "scrub", "--")))
        check("of that command only", "--force" not in complete(script, "kvctl", "spill", "scrub", "--"))
        equal("pools", complete(script, "kvctl", "-s", p.socket, "blocks", ""), ["demo/kv"])
        equal("spaces", complete(script, "kvctl", "flush", "d", env={"KVD_SOCKET": p.socket}), ["demo"])
        equal("stores, though one is offline", complete(script, "kvctl", "-s", p.socket, "spill", "online", "demo/"),
              ["demo/kv/a", "demo/kv/b"])
        check("zsh", kvctl("completion", "zsh").out.endswith(kvctl("completion", "bash").out))


# ---- roles and permissions

def test_roles():
    with Place() as p:
        p.daemon(sockets="[socket a]\npath = RUN/kvd.sock\nrole = admin\n[socket r]\npath = RUN/r.sock\nrole = reader")
        reader = p.path("run/r.sock")
        equal("a reader may ask for the status", kvctl("-s", reader, "status").rc, OK)
        for args in [["sessions"], ["blocks", "demo/kv"], ["why", "demo/kv", "00"], ["evict", "demo/kv", "-n", "1"],
                     ["flush", "demo"], ["kill", "1"]]:
            r = kvctl("-s", reader, *args)
            check(f"but not {args[0]}", r.rc == REFUSED and "admin" in r.err, r.both)
        r = kvctl("-s", reader, "check", "-o", "json")
        level, _, fix = by_item(r)["sessions"][0]
        check("check says which socket shows sessions", r.rc == OK and level == "skip" and p.socket in fix[0], r.both)


def as_nobody():
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)


def test_permission():
    if os.getuid() != 0:
        return skip("needs root, to become nobody")
    with Place() as p:
        p.daemon(sockets=f"[socket a]\npath = RUN/kvd.sock\nrole = admin\nmode = 0660\ngroup = {GROUP}\n"
                         f"[socket b]\npath = RUN/b.sock\nrole = admin\nmode = 0600\ngroup = {GROUP}")
        os.chmod(p.path("run"), 0o755)
        r = p.kvctl("ping", preexec_fn=as_nobody)
        check("ping", r.rc == REFUSED and p.socket in r.err, r.both)
        r = p.kvctl("check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("the group to join", r.rc == UNHEALTHY and level == "FAIL" and f"usermod -aG {GROUP} nobody" in fix, r.both)
        r = kvctl("-s", p.path("run/b.sock"), "check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("no group helps", level == "FAIL" and not any("usermod" in f for f in fix) and "sudo" in fix[0], r.both)
        os.chmod(p.path("run"), 0o700)
        r = p.kvctl("check", "-o", "json", preexec_fn=as_nobody)
        level, text, fix = by_item(r)["daemon"][0]
        check("the directory", level == "FAIL" and f"chmod a+x {p.path('run')}" in fix, r.both)


# ---- an unwell daemon

def test_stopped():
    with Place() as p:
        d = p.daemon()
        d.send_signal(signal.SIGSTOP)
        r = p.kvctl("ping", "--timeout", "0.3")
        check("ping", r.rc == UNREACHABLE and "stopped" in r.err, r.both)
        equal("wait", p.kvctl("wait", "--timeout", "0.3").rc, UNREACHABLE)
        items = by_item(p.kvctl("check", "--timeout", "0.3", "-o", "json"))
        check("check", items["daemon"][0][0] == "FAIL" and "answer" in items["daemon"][0][1], items)
        d.send_signal(signal.SIGCONT)
        equal("afterwards", p.kvctl("ping").rc, OK)


def test_degraded():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50, live=50), state="degraded", hugepages="try",
                                  problems=["pool demo/kv has none; fix: do this; not that: gone; fix: do that"]))
        r = p.kvctl("status")
        check("status", r.rc == UNHEALTHY and "degraded" in r.out and "problem: pool demo/kv" in r.out, r.both)
        equal("wait --ready: it serves", p.kvctl("wait", "--ready").rc, OK)
        r = p.kvctl("check", "-o", "json")
        level, text, fix = by_item(r)["problem"][0]
        equal("its problems, and the cures", (r.rc, level, text, fix),
              (UNHEALTHY, "FAIL", "pool demo/kv has none; not that: gone", ["do this", "do that"]))
    with Place() as p:
        p.fake(status=fake_status(fake_pool(), state="starting"))
        equal("wait", p.kvctl("wait").rc, OK)
        r = p.kvctl("wait", "--ready", "--timeout", "0.2")
        check("wait --ready", r.rc == UNHEALTHY and "starting" in r.err, r.both)
    with Place() as p:
        p.fake(silent=True)
        equal("wait for one that is silent", p.kvctl("wait", "--timeout", "0.2").rc, UNHEALTHY)
        r = p.kvctl("status", "--timeout", "0.2")
        equal("status of it", r.rc, UNREACHABLE)


def test_versions():
    with Place() as p:
        p.fake(daemon="kvd 9.9.9", status=fake_status(fake_pool(free=50), version="9.9.9"))
        level, text, fix = by_item(p.kvctl("check", "-o", "json"))["version"][0]
        check("differ", level == "warn" and "9.9.9" in text and "restart kvd" in fix[0], (level, text, fix))
        p.closing.pop().close()
    with Place() as p:
        p.daemon()
        equal("do not", by_item(p.kvctl("check", "-o", "json"))["version"][0][0], "ok")


def test_pins():
    holders = message((1, [fake_session(3, objects=1, size=10), fake_session(4, objects=90, size=9000, oldest=3725,
                                                                            client="hog"), fake_session(5)]))
    for live, pinned, level in [(100, 50, "ok"), (100, 95, "warn"), (100, 100, "FAIL")]:
        with Place() as p:
            p.fake(status=fake_status(fake_pool(live=live, pinned=pinned)), sessions=holders)
            r = p.kvctl("check", "-o", "json")
            got = by_item(r)["pins"][0]
            equal(f"{pinned} of 100 pinned", (got[0], r.rc), (level, UNHEALTHY if level == "FAIL" else OK), r.both)
            if level == "ok":
                continue
            check("names the pool", "demo/kv" in got[1], got)
            check("who holds most comes first", got[2][0].startswith("kvctl kill 4 ") and "hog" in got[2][0] and
                  "1 h 2 min" in got[2][0] and "8.8 KiB" in got[2][0], got)
            check("who holds nothing is not named", not any("kill 5" in f for f in got[2]), got)
    with Place() as p:  # really
        p.daemon(pool="slot = 64K\nslots = 16\nlow_water = 0\nhigh_water = 0")
        w = p.worker(client="hog")
        w.put(names(16))
        equal("pinned", w.pin(names(16)), 16)
        level, text, fix = by_item(p.kvctl("check", "-o", "json"))["pins"][0]
        check("a real pool", level == "FAIL" and f"kvctl kill {w.session} " in fix[0], (level, text, fix))


def test_broken_sessions():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=50)),
               sessions=message((1, [fake_session(3), fake_session(4, state="broken", note="nonsense in its ring")])))
        r = p.kvctl("check", "-o", "json")
        level, text, fix = by_item(r)["sessions"][0]
        check("named", level == "warn" and "session 4" in text and "nonsense" in text and "kill 4" in fix[0], r.both)
        equal("a warning is no failure", r.rc, OK)


def test_hostile_daemon():
    with Place() as p:
        p.fake(status=fake_status(fake_pool(free=1), state="degraded", problems=["a\x1b]0;b\x07c\nd"]))
        for command in ("status", "check"):
            r = p.kvctl(command)
            check(f"{command}: no control characters", not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", r.out + r.err), r.both)
    with Place() as p:
        s = socket.socket(socket.AF_UNIX)
        s.bind(p.path("x.sock"))
        s.listen()

        def garbage():
            with contextlib.suppress(OSError):
                while True:
                    c = s.accept()[0]
                    c.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
                    c.close()
        threading.Thread(target=garbage, daemon=True).start()
        p.closing.append(s)
        r = kvctl("-s", p.path("x.sock"), "ping")
        check("not kvd", r.rc in (FAILED, UNREACHABLE) and "kvd" in r.err, r.both)


# ---- the machine

GOOD = {
    "/proc/sys/kernel/osrelease": "6.1.0-18-amd64\n",
    "/proc/sys/vm/overcommit_memory": "0\n",
    "/proc/meminfo": "MemTotal: 99999999 kB\nMemAvailable: 9000000 kB\nCommitLimit: 1000 kB\nCommitted_AS: 500 kB\n"
                     "Hugepagesize: 2048 kB\n",
    "/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/vda rw\n30 22 0:25 / /run rw,nosuid - tmpfs tmpfs rw\n"
                            "31 22 0:26 / /dev/hugepages rw shared:1 - hugetlbfs hugetlbfs rw,pagesize=2M\n",
    "/proc/self/status": "Name: x\nCapEff:\t0000000000000000\n",
    "/proc/self/limits": "Max locked memory         unlimited            unlimited            bytes\n",
    "/proc/self/cgroup": "0::/user.slice/a.scope\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages": "10\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages": "9\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages": "0\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages": "0\n",
    "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages": "0\n",
    "/run/systemd/system/x": "",
    "/run/kvd/x": "",
    "/dev/hugepages/kvd/x": "",
}
# 2 parts of 3 * 1.5 MiB: 3 pages each, since each part is a segment
POOL = "parts = 2\nslot = 3M\nslots = 3"


def examine(pool=POOL, daemon="", **changes):
    """Items of a machine that is GOOD but for the changes: contents by names of files; None: not there."""
    with Place() as p:
        files = {**GOOD, **{k: v for k, v in changes.items() if k.startswith("/")}}
        for name, text in files.items():
            if text is not None:
                p.write("root" + name, text)
        config = p.write("kvd.conf", f"[daemon]\n{daemon}\n[space demo]\n[pool demo/kv]\n{pool}\n")
        r = kvctl("-s", p.path("none"), "check", "-c", config, "--root", p.path("root"), "-o", "json")
        return by_item(r)


def machine(what, item, level, text, fix, **changes):
    got = examine(**changes).get(item, [("absent", "", [])])
    good = any(l == level and re.search(text, t) and (fix in f if fix else not f) for l, t, f in got)
    check(what, good, f"{item}: {got}, wanted {level} /{text}/ {fix}")


HUGE = "/sys/kernel/mm/hugepages/hugepages-2048kB/"


def test_machine_kernel():
    machine("6.1 will do", "kernel", "ok", "6.1", None)
    r = examine(**{"/proc/sys/kernel/osrelease": "5.10.0-28-amd64\n"})["kernel"][0]
    check("5.10 will not", r[0] == "FAIL" and "6.1" in r[1] and "apt install" in r[2][0], r)
    equal("6.0 will not", examine(**{"/proc/sys/kernel/osrelease": "6.0.9\n"})["kernel"][0][0], "FAIL")
    equal("7.0 will", examine(**{"/proc/sys/kernel/osrelease": "7.0.1\n"})["kernel"][0][0], "ok")
    equal("unreadable", examine(**{"/proc/sys/kernel/osrelease": None})["kernel"][0][0], "skip")


def test_machine_hugepages():
    machine("enough", "hugepages", "ok", "need 6 pages of 2 MiB; 0 are theirs, 9 free", None)
    few = {HUGE + "free_hugepages": "5\n", HUGE + "resv_hugepages": "2\n"}  # 3 to be had, 6 needed, 10 there
    machine("too few", "hugepages", "warn", "need 6 pages.*there are 3", "sysctl vm.nr_hugepages=13", **few)
    machine("that are required", "hugepages", "FAIL", "need 6", "sysctl vm.nr_hugepages=13",
            daemon="hugepages = require", **few)
    machine("overcommit helps", "hugepages", "ok", "need 6", None, **few, **{HUGE + "nr_overcommit_hugepages": "3\n"})
    machine("surplus pages are no persistent ones", "hugepages", "warn", "need 6", "sysctl vm.nr_hugepages=11",
            **few, **{HUGE + "surplus_hugepages": "2\n"})
    machine("not wanted", "hugepages", "ok", "off", None, daemon="hugepages = off", **few)
    machine("a size that the kernel does not have", "hugepages", "warn", "no hugepages of 1048576 KiB",
            '"page_size = auto" in [daemon], or boot with hugepagesz=1048576K', daemon="page_size = 1G")
    gig = {k.replace("2048", "1048576"): "0\n" for k in GOOD if "2048kB" in k}
    machine("another size than the usual one", "hugepages", "warn", "need 2 pages of 1 GiB",
            "echo 2 > /sys/kernel/mm/hugepages/hugepages-1048576kB/nr_hugepages", daemon="page_size = 1G", **gig)
    poor = {"/proc/meminfo": GOOD["/proc/meminfo"].replace("9000000", "1024")}
    r = examine(**few, **poor)["hugepages"][0]
    check("no memory for more", any("smaller pools" in f and "1 MiB" in f for f in r[2]), r)


def test_machine_hugetlbfs():
    none = {"/proc/self/mountinfo": "".join(GOOD["/proc/self/mountinfo"].splitlines(True)[:2])}
    machine("mounted", "hugetlbfs", "ok", "/dev/hugepages", None)
    machine("not mounted", "hugetlbfs", "warn", "no mount", "systemctl start dev-hugepages.mount", **none)
    machine("without systemd", "hugetlbfs", "warn", "no mount",
            "mkdir -p /dev/hugepages && mount -t hugetlbfs -o pagesize=2048K none /dev/hugepages", **none,
            **{"/run/systemd/system/x": None})
    machine("a folder on it", "hugetlbfs", "ok", "/dev/hugepages/kvd", None, daemon="hugetlbfs = /dev/hugepages/kvd")
    machine("that is missing", "hugetlbfs", "warn", "does not exist", "install -d -m 0700 -o kvd -g kvd /dev/hugepages/q",
            daemon="hugetlbfs = /dev/hugepages/q")
    machine("that is elsewhere", "hugetlbfs", "warn", "not on a hugetlbfs", '"hugetlbfs = /dev/hugepages/kvd" in [daemon]',
            daemon="hugetlbfs = /srv/huge")
    machine("of another size", "hugetlbfs", "warn", "pages of 2048 KiB, not of 1048576", '"page_size = auto" in [daemon]',
            daemon="hugetlbfs = /dev/hugepages/kvd\npage_size = 1G")


def test_machine_memory():
    off = {"daemon": "hugepages = off"}
    machine("hugepages only", "memory", "ok", "hugepages only", None)
    machine("small pages", "memory", "ok", "9 MiB on small pages", None, **off)
    poor = {"/proc/meminfo": GOOD["/proc/meminfo"].replace("9000000", "1024")}
    machine("too little", "memory", "FAIL", "9 MiB.*this machine leaves 1 MiB", 'a smaller "size" (or "slots") in [pool demo/kv]',
            **off, **poor)
    machine("no overcommit", "memory", "FAIL", "overcommit_memory = 2 leaves 500 KiB", "sysctl vm.overcommit_memory=0", **off,
            **{"/proc/sys/vm/overcommit_memory": "2\n"})
    limit = "systemctl set-property kvd.service MemoryMax=infinity (docker: --memory)"
    machine("a control group", "memory", "warn", "control group.*leaves 3 MiB", limit, **off,
            **{"/sys/fs/cgroup/user.slice/a.scope/memory.max": "max\n",
               "/sys/fs/cgroup/user.slice/memory.max": f"{4 << 20}\n", "/sys/fs/cgroup/user.slice/memory.current": f"{1 << 20}\n"})
    machine("the tightest of several", "memory", "warn", "control group.*leaves 2 MiB", limit, **off,
            **{"/sys/fs/cgroup/user.slice/a.scope/memory.max": f"{2 << 20}\n", "/sys/fs/cgroup/user.slice/memory.max": f"{8 << 20}\n"})
    machine("of version 1", "memory", "warn", "control group.*leaves 1 MiB", limit, **off,
            **{"/proc/self/cgroup": "4:memory:/a/b\n0::/\n", "/sys/fs/cgroup/memory/a/memory.limit_in_bytes": f"{1 << 20}\n",
               "/sys/fs/cgroup/memory/a/b/memory.limit_in_bytes": "9223372036854771712\n"})
    r = examine(**{"/sys/fs/cgroup/user.slice/hugetlb.2MB.max": f"{4 << 20}\n"})["memory"][0]
    check("hugepages of a control group", r[0] == "warn" and "need 6 hugepages" in r[1] and "allows 2" in r[1], r)
    machine("what does not fit on hugepages", "memory", "ok", "6 MiB on small pages", None,
            **{HUGE + "free_hugepages": "3\n"})


def test_machine_stores():
    store = POOL + "\n[spill demo/kv/a]\npath = /srv/kvd/a\nsize = 1G"
    there = {"pool": store, "/srv/kvd/x": ""}
    machine("ext4", "stores", "ok", "demo/kv/a: /srv/kvd/a is on ext4", None, **there)
    machine("no folder", "stores", "FAIL", "/srv/kvd does not exist", "install -d -m 0700 -o kvd -g kvd /srv/kvd", pool=store)
    mounts = GOOD["/proc/self/mountinfo"]
    machine("memory", "stores", "warn", "is on a tmpfs: it takes memory",
            '"path" in [spill demo/kv/a]: below /var/lib/kvd, or another folder on a drive', **there,
            **{"/proc/self/mountinfo": mounts + "40 22 0:9 / /srv rw - tmpfs t rw\n"})
    machine("a network", "stores", "warn", "is on nfs4, which may do without direct I/O",
            '"path" in [spill demo/kv/a]: on ext4 or XFS on a local drive, or the drive itself', **there,
            **{"/proc/self/mountinfo": mounts + "40 22 0:9 / /srv rw - nfs4 t rw\n"})
    got = examine(**{**there, "pool": store.replace("1G", "1000T")})["stores"][0]
    check("too large", got[0] == "FAIL" and "1000 TiB" in got[1] and
          re.fullmatch(r'"size = \d+[GM]" in \[spill demo/kv/a\], or space', got[2][0]), got)
    machine("no real file system", "stores", "FAIL", "is on a sysfs, which holds no stores",
            '"path" in [spill demo/kv/a]: below /var/lib/kvd, or another folder on a drive', **there,
            **{"/proc/self/mountinfo": mounts + "40 22 0:9 / /srv rw - sysfs t rw\n"})
    machine("somebody's file", "stores", "FAIL", "is not empty and no store of kvd",
            "another path; or if nobody needs what is there, when kvd runs: kvctl spill format demo/kv/a --force",
            **there, **{"/srv/kvd/a": "letters"})
    machine("one of zeros", "stores", "ok", "is on ext4", None, **there, **{"/srv/kvd/a": "\0" * 70000})
    got = examine(**{**there, "pool": store.replace("1G", "1000T"), "/srv/kvd/a": "\0" * 70000})["stores"][0]
    check("that are too few", got[0] == "FAIL" and "1000 TiB" in got[1], got)
    got = examine(**{**there, "pool": store.replace("1G", "1000T"), "/srv/kvd/a": "kvdspill" + "\0" * 5000})["stores"][0]
    check("a store has its room", got[0] == "ok", got)
    machine("what kvd has made", "stores", "ok", "is on ext4", None, **there, **{"/srv/kvd/a": "kvdspill" + "\0" * 5000})
    machine("no such device", "stores", "FAIL", "there is no such device", 'lsblk lists them; "path" in [spill demo/kv/a]',
            pool=store.replace("/srv/kvd/a", "/dev/nvme7n1"))
    check("without stores nothing is said", not {"stores", "io_uring"} & examine().keys())


def test_places_of_others():
    """What the user who will run the daemon may not use."""
    with Place() as p:
        disk = tempfile.mkdtemp(prefix="kvctl-place-", dir="/tmp")
        os.chmod(disk, 0o755)
        config = p.write("kvd.conf", f"[space demo]\n[pool demo/kv]\nslot = 64K\nslots = 16\n[spill demo/kv/a]\n"
                                     f"path = {disk}/a\nsize = 32M\n")
        try:
            def look(**who):
                return by_item(kvctl("-s", p.path("none"), "check", "-c", config, "-o", "json", **who))["stores"][0]
            if os.geteuid():
                return skip("only root can be another user")
            with contextlib.suppress(KeyError):
                pwd.getpwnam("kvd")
                return skip("here check is about user kvd")
            nobody = dict(preexec_fn=lambda: os.setresuid(NOBODY, NOBODY, NOBODY))
            equal("root may", look()[0], "ok")
            got = look(**nobody)
            check("a folder", got[0] == "FAIL" and "may not make files in " + disk in got[1] and "chown" in got[2][0], got)
            os.mkdir(disk + "/in", 0o700)
            p.write("kvd.conf", open(config).read().replace("/a\n", "/in/there/a\n"))
            got = look(**nobody)
            check("a folder above", got[0] != "ok" and got[0] != "warn", got)
            p.write("kvd.conf", open(config).read().replace("/in/there/a\n", "/b\n"))
            os.chown(disk, NOBODY, -1)
            equal("that is theirs", look(**nobody)[0], "ok")
            os.close(os.open(disk + "/b", os.O_CREAT | os.O_WRONLY, 0o600))
            got = look(**nobody)
            check("a file", got[0] == "FAIL" and "belongs to user 0, mode 0600" in got[1] and "chown" in got[2][0], got)
            os.chmod(disk + "/b", 0o620)
            got = look()
            check("what others may write", got[0] == "FAIL" and got[2] == [f"chmod go-w {disk}/b"], got)
            p.write("kvd.conf", open(config).read().replace("/b\n", "/none/b\n"))
            equal("no folder", look()[2], [f"install -d -m 0700 {disk}/none"])
        finally:
            shutil.rmtree(disk)


def test_machine_io_uring():
    store = POOL + "\n[spill demo/kv/a]\npath = /srv/kvd/a\nsize = 1G"
    off = {"/proc/sys/kernel/io_uring_disabled": "2\n"}
    machine("by sysctl", "io_uring", "warn", "io_uring_disabled = 2: stores get by with threads",
            "sysctl kernel.io_uring_disabled=0", pool=store, **off)
    machine("though it is demanded", "io_uring", "FAIL", "io_uring_disabled = 2", "sysctl kernel.io_uring_disabled=0",
            pool=store + "\nio = io_uring", **off)
    check("not wanted", "io_uring" not in examine(pool=store + "\nio = threads", **off))
    if platform.machine() not in ("x86_64", "aarch64"):
        return skip("numbers of system calls are known for x86-64 and arm64 only")
    with Place() as p:
        config = p.write("kvd.conf", f"[space demo]\n[pool demo/kv]\n{store}\n")
        args = ["-s", p.path("none"), "check", "-c", config, "-o", "json"]
        for error, wanted in [(1, "denied here"), (38, "the kernel does not have it")]:
            got = by_item(kvctl(*args, preexec_fn=seccomp(425, None, 0, error)))["io_uring"][0]
            check(wanted, got[0] == "warn" and wanted in got[1] and len(got[2]) == 1, got)


def test_machine_rest():
    machine("runtime_dir", "runtime_dir", "ok", "tmpfs", None)
    machine("on a disk", "runtime_dir", "warn", "ext4", '"runtime_dir = /run/kvd" in [daemon]',
            **{"/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 /dev/vda rw\n"})
    mounts = {"/proc/self/mountinfo": "22 1 8:1 / / rw - ext4 x rw\n23 22 0:1 / /run/a\\040b rw - tmpfs t rw\n"}
    machine("a path with a blank", "runtime_dir", "ok", "tmpfs", None, daemon="runtime_dir = /run/a b", **mounts)
    machine("the beginning of a name is no folder", "runtime_dir", "warn", "ext4",
            '"runtime_dir = /run/kvd" in [daemon]', daemon="runtime_dir = /run/a bc", **mounts)
    machine("memlock", "memlock", "ok", "no limit", None)
    low = {"/proc/self/limits": "Max locked memory         65536                65536                bytes\n"}
    r = examine(**low)["memlock"][0]
    check("too low", r[0] == "warn" and "64 KiB" in r[1] and "9 MiB" in r[1] and "LimitMEMLOCK=infinity" in r[2][0], r)
    machine("root does not mind", "memlock", "ok", "CAP_IPC_LOCK", None, **low,
            **{"/proc/self/status": "CapEff:\t0000000000004000\n"})


def seccomp(number, argument, value, error):
    """A filter for the child: this system call, with this value of an argument (None: any), fails."""
    def install():
        ret, allow = 0x06, 0x7FFF0000
        code = [(0x20, 0, 0, 0), (0x15, 0, 1 if argument is None else 3, number)]
        if argument is not None:
            code += [(0x20, 0, 0, 16 + 8 * argument), (0x15, 0, 1, value)]
        code += [(ret, 0, 0, 0x00050000 | error), (ret, 0, 0, allow)]
        raw = b"".join(struct.pack("<HBBI", *c) for c in code)
        buffer = ctypes.create_string_buffer(raw)
        program = struct.pack("<HxxxxxxQ", len(code), ctypes.addressof(buffer))
        libc = ctypes.CDLL(None, use_errno=True)
        holder = ctypes.create_string_buffer(program)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, holder, 0, 0):
            os._exit(99)
    return install


def test_pidfd():
    getsockopt = {"x86_64": 55, "aarch64": 209}.get(platform.machine())
    if getsockopt is None:
        return skip("numbers of system calls are known for x86-64 and arm64 only")

    def both():
        seccomp(434, None, 0, 1)()
        seccomp(getsockopt, 2, 77, 92)()
    with Place() as p:
        def look(install):
            r = kvctl("-s", p.path("none"), "check", "-o", "json", preexec_fn=install)
            return by_item(r)["pidfd"][0]
        equal("works", look(None)[0], "ok")
        got = look(seccomp(getsockopt, 2, 77, 92))
        check("without SO_PEERPIDFD (before Linux 6.5)", got[0] == "ok" and "pidfd_open() works" in got[1], got)
        got = look(both)
        check("a container forbids it", got[0] == "FAIL" and "not permitted" in got[1] and "seccomp" in got[2][0], got)


def test_check_config():
    with Place() as p:
        p.daemon()
        r = p.kvctl("check", "-c", p.path("kvd.conf"), "-o", "json")
        equal("good", (by_item(r)["config"][0][0], r.rc), ("ok", OK), r.both)
        bad = p.write("bad.conf", "[daemon]\nhugepage = off\n")
        got = by_item(p.kvctl("check", "-c", bad, "-o", "json"))["config"][0]
        check("bad", got[0] == "FAIL" and "bad.conf:2" in got[1] and got[2] == [f"kvctl config check {bad}"], got)
        got = by_item(p.kvctl("check", "-c", p.path("none.conf"), "-o", "json"))["config"][0]
        check("missing", got[0] == "FAIL" and "none.conf" in got[1], got)


# ---- configuration and keys

def test_config_check():
    with Place() as p:
        r = kvctl("config", "check", p.config())
        check("good", r.rc == OK and "good: 1 space, 1 pool (16 MiB), 1 socket" in r.out, r.both)
        r = kvctl("config", "check", p.config(), "-o", "json")
        equal("as JSON", (r.json()["good"], r.json()["problems"], r.json()["pool_bytes"]), (True, [], 16 << 20))
        stored = p.config(spaces=f"[space demo]\n[spill demo/kv/a]\npath = {p.path('a')}\nsize = 1G")
        r = kvctl("config", "check", stored)
        check("with a store", r.rc == OK and r.out.endswith(", 1 socket, 1 store (1 GiB)\n"), r.both)
        equal("as JSON", (kvctl("config", "check", stored, "-o", "json").json()["stores"]), 1)
        bad = p.write("bad.conf", "[daemon]\nhugepage = off\n[space a]\n[pool b/c]\nslot = 5\n")
        r = kvctl("config", "check", bad)
        check("every problem has its line", r.rc == FAILED and f"{bad}:2: error:" in r.out and f"{bad}:5: error:" in r.out,
              r.both)
        r = kvctl("config", "check", bad, "-o", "json")
        check("as JSON", not r.json()["good"] and {x.get("line") for x in r.json()["problems"]} >= {2, 5}, r.both)
        equal("missing", kvctl("config", "check", p.path("none")).rc, NOT_FOUND)


def test_keys_golden():
    with open(os.path.join(HERE, "..", "data", "chains.json")) as f:
        chains = json.load(f)
    tried = 0
    with Place() as p:
        for i, c in enumerate(chains):
            if c.get("mm") or c.get("mm_items") or c.get("items"):
                continue
            tokens = p.write(f"{i}.json", json.dumps(c["tokens"]))
            if c["scheme"] == "vllm":
                args = ["--scheme", "vllm-" + c["hash"].replace("_", "-"), "-b", str(c["block_tokens"])]
                args += ["--seed", c["seed"]] if c.get("seed") is not None else ["--first-parent", c["none_hash"]]
            else:
                args = ["--scheme", "sglang", "-b", str(c["page_tokens"])]
            for option, name in [("--salt", "cache_salt"), ("--lora", "lora"), ("--extra-key", "extra_key")]:
                args += [option, c[name]] if c.get(name) is not None else []
            r = kvctl("keys", *args, tokens, "-o", "json")
            if r.rc:
                check(f"chain {i}", False, r.both)
                continue
            equal(f"chain {i}", [k["key"] for k in r.json()["keys"]], c["keys"])
            tried += 1
    check("there were some", tried >= 5, tried)


def sglang(tokens, block):
    keys, parent = [], b""
    for i in range(0, len(tokens) // block * block, block):
        parent = hashlib.sha256(parent + struct.pack(f"<{block}I", *tokens[i:i + block])).digest()
        keys.append(parent.hex())
    return keys


def test_keys_formats():
    with Place() as p:
        text = "A text, and more of it: ä."
        tokens = list(text.encode())
        wanted = sglang(tokens, 4)
        args = ["keys", "--scheme", "sglang", "-b", "4", "-o", "json"]
        for name, content, more in [("t.txt", text, []), ("t.json", json.dumps(tokens), []),
                                    ("t.u32", struct.pack(f"<{len(tokens)}I", *tokens), []),
                                    ("t", "\n" + json.dumps(tokens) + "\n", ["-f", "json"])]:
            r = kvctl(*args, *more, p.write(name, content))
            equal(name, [k["key"] for k in r.json()["keys"]], wanted, r.both)
        r = kvctl(*args, "-", input=text)
        equal("standard input", [k["key"] for k in r.json()["keys"]], wanted)
        r = kvctl(*args, "-g", "3", p.path("t.txt"))
        equal("a group", r.json()["keys"][0]["name"], wanted[0] + ":3")
        r = kvctl("keys", "--scheme", "sglang", "-b", "4", p.path("t.txt"))
        check("table", r.rows()[1] == ["0", "0", "3", wanted[0]] and f"the last {len(tokens) % 4} of" in r.err, r.both)
        big = struct.pack("<8I", *([0xffffffff, 70000] * 4))
        r = kvctl(*args, p.write("big.u32", big))
        equal("large tokens", [k["key"] for k in r.json()["keys"]], sglang([0xffffffff, 70000] * 4, 4))


def test_keys_errors():
    with Place() as p:
        good = p.write("t.json", "[1, 2, 3, 4]")
        for name, content, wanted in [("a.json", "[1, -2]", "token 1 is -2"), ("b.json", "[1, 4294967296]", "token 1"),
                                      ("c.json", "[1.5]", "token 0 is 1.5"), ("d.json", '["1"]', "token 0"),
                                      ("e.json", "[1, 2", "ends too early"), ("f.json", "[1 2]", "at byte"),
                                      ("g.json", "{}", "array"), ("h.json", "[1] [2]", "array"), ("i.json", "", "JSON"),
                                      ("j.u32", b"12345", "5 bytes"), ("k.json", "[null]", "null")]:
            r = kvctl("keys", "--scheme", "sglang", p.write(name, content))
            check(f"{content!r}", r.rc == FAILED and wanted in r.err and not r.out, r.both)
        equal("no file", kvctl("keys", "--scheme", "sglang", p.path("none")).rc, NOT_FOUND)
        for args, wanted in [([], "--scheme"), (["--scheme", "md5"], "md5"), (["--scheme", "vllm-xxhash-cbor"], "--seed"),
                             (["--scheme", "sglang", "--seed", "0"], "first parent"),
                             (["--scheme", "sglang", "--lora", "x"], "--extra-key"),
                             (["--scheme", "vllm-sha256-cbor", "--extra-key", "x"], "sglang only"),
                             (["--scheme", "vllm-sha256-cbor", "--seed", "0", "--first-parent", "00" * 32], "not both"),
                             (["--scheme", "vllm-sha256-cbor", "--first-parent", "00"], "16 or 32"),
                             (["--scheme", "sglang", "-b", "0"], "65536"), (["--scheme", "sglang", "-f", "x"], "u32")]:
            r = kvctl("keys", *args, good)
            check(f"{args}", r.rc == USAGE and wanted in r.err, r.both)


# ---- terminals

def on_terminal(*args, env=None):
    return on_terminal_with(b"", *args, env=env)[0]


def on_terminal_with(typed, *args, env=None):
    """(what it shows, exit status), after so much was typed."""
    pid, fd = pty.fork()
    if pid == 0:
        os.environ.pop("NO_COLOR", None)
        os.environ.update(env or {})
        os.execv(KVCTL, [KVCTL, *args])
    os.write(fd, typed)
    out = b""
    with contextlib.suppress(OSError):
        while True:
            more = os.read(fd, 65536)
            if not more:
                break
            out += more
    rc = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.close(fd)
    return out.decode(errors="replace"), rc


def test_color():
    with Place() as p:
        args = ["-s", p.path("none"), "check"]
        term = {"TERM": "xterm"}
        check("on a terminal", "\x1b[" in on_terminal(*args, env=term))
        check("not with NO_COLOR", "\x1b[" not in on_terminal(*args, env={**term, "NO_COLOR": "1"}))
        check("an empty NO_COLOR is none", "\x1b[" in on_terminal(*args, env={**term, "NO_COLOR": ""}))
        check("not with --no-color", "\x1b[" not in on_terminal("--no-color", *args, env=term))
        check("not in a pipe", "\x1b" not in kvctl(*args).out)


def test_full_disk():
    with Place() as p:
        p.daemon()
        with open("/dev/full", "w") as full:
            r = subprocess.run([KVCTL, "-s", p.socket, "status"], stdout=full, stderr=subprocess.PIPE, text=True)
        check("a lost output is a failure", r.returncode == FAILED and "cannot write" in r.stderr, r)


def main():
    global current
    if not KVD:
        sys.exit("usage: kvctl.py KVD KVCTL [NAME...]")
    for name, test in list(globals().items()):
        if not name.startswith("test_") or (sys.argv[3:] and not any(n in name for n in sys.argv[3:])):
            continue
        current = name[5:]
        try:
            test()
        except Exception as e:  # one broken test must not hide the others
            check("ran to its end", False, f"{type(e).__name__}: {e}")
    print(f"{passed} passed, {failed} failed" + (f" ({skipped} skipped)" if skipped else ""))
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
