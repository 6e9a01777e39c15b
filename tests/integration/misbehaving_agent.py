# SPDX-License-Identifier: Apache-2.0
"""An agent that misbehaves as its first argument says. It uses the standard library only, so that it starts quickly."""

import json
import os
import signal
import socket
import sys
import threading
import time
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlsplit

ADDRESS, KEY = urlsplit(os.environ["OPENAI_BASE_URL"]), os.environ["OPENAI_API_KEY"]
MEETING = Path(os.environ["MEETING"])
QUESTION = [{"role": "user", "content": "1 + 2?"}]
HEAD = f"POST {ADDRESS.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
HOUR = 3600


def ask(messages, path=ADDRESS.path):
    connection = HTTPConnection(ADDRESS.hostname, ADDRESS.port, timeout=HOUR)
    body = json.dumps({"model": "any", "messages": messages})
    connection.request("POST", f"{path}/chat/completions", body, {"Authorization": f"Bearer {KEY}"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def asked():
    status, reply = ask(QUESTION)
    assert status == 200, reply
    return reply["choices"][0]["message"]


def connected():
    return socket.create_connection((ADDRESS.hostname, ADDRESS.port))


def forever(attempt):
    while True:
        try:
            attempt()
        except OSError:
            time.sleep(0.01)


def good():
    said = asked()
    for _ in range(4):
        time.sleep(0.5)
        status, reply = ask([*QUESTION, said, {"role": "user", "content": "Sure?"}])
        assert status == 200, reply
    Path(os.environ["TMPDIR"], "notes").write_text("x" * 1000)
    sys.stdout.write("1.0")


def visited():
    (MEETING / "address").write_text(ADDRESS.path)
    while not (MEETING / "tried").exists():
        time.sleep(0.05)
    good()


def trespasses():
    while not (MEETING / "address").exists() or not (MEETING / "address").read_text():
        time.sleep(0.05)
    status, reply = ask(QUESTION, (MEETING / "address").read_text())
    (MEETING / "tried").touch()
    sys.exit(f"{status} {reply['error']['code']}")


def sleeps():
    asked()
    time.sleep(HOUR)


def crashes():
    asked()
    sys.exit("out of ideas")


def faults():
    os.kill(os.getpid(), signal.SIGSEGV)


def ignores():
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0) if os.getpgid(0) != os.getpid() else None
    time.sleep(HOUR)


def kills_its_watcher():
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(HOUR)


def floods_output():
    for _ in range(100):
        os.write(1, b"x" * (1 << 20))
        os.write(2, b"y" * (1 << 20))
    sys.exit("end of the flood")


def floods_requests():
    def one():
        ask([{"role": "user", "content": "x" * 2000}])

    for _ in range(300):
        threading.Thread(target=forever, args=(one,), daemon=True).start()
    time.sleep(HOUR)


def floods_connections():
    held = []

    def one():
        held.append(connected())
        held[-1].send(HEAD[:-1].encode())

    forever(one)


def floods_heads():
    def one():
        with connected() as opened:
            while True:
                opened.send(b"GET / HTTP/1.1\r\nX: " + b"x" * (1 << 20))

    forever(one)


def floods_bodies():
    def one():
        with connected() as opened:
            opened.send(f"{HEAD}Content-Length: {1 << 33}\r\n\r\n".encode())
            while True:
                opened.send(b" " * (1 << 20))

    forever(one)


def floods_text():
    forever(lambda: ask([{"role": "user", "content": "x" * (30 << 20)}]))


def drips():
    opened = connected()
    opened.send(f"{HEAD}Content-Length: 1000000\r\n\r\n".encode())
    while True:
        opened.send(b" ")
        time.sleep(0.1)


def never_reads():
    body = json.dumps({"messages": QUESTION})
    request = f"{HEAD}Content-Length: {len(body)}\r\n\r\n{body}".encode()

    def one():
        with connected() as opened:
            while True:
                opened.send(request)

    forever(one)


def forks():
    asked()
    if not os.fork():
        time.sleep(HOUR)
    sys.stdout.write("1.0")


def escapes():
    if not os.fork():
        os.setsid()
        if not os.fork():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(HOUR)
        os._exit(0)
    time.sleep(0.5)
    sys.exit("gone")


def escapes_and_sleeps():
    if os.fork() and os.fork():
        time.sleep(HOUR)
    os.setsid()
    time.sleep(HOUR)


def escapes_on_and_on():
    """Each process leaves its session, starts the next one, and ends."""
    if not os.fork():
        while True:
            os.setsid() if os.getsid(0) != os.getpid() else None
            if os.fork():
                os._exit(0)
    time.sleep(0.5)
    sys.exit("gone")


globals()[sys.argv[1]]()
