"""A reward server over ZMQ and msgpack: pyzmq and msgpack alone, nothing of areal-async.

    pip install pyzmq msgpack
    python server.py [port]        (port 0, the default, picks a free one and prints it)

docs/reward-rpc.md says what a server answers. This one offers one reward, `share_of_ones`.
"""

import os
import sys

import msgpack
import zmq
from zmq.auth.thread import ThreadAuthenticator

PROTOCOL = 1
TOKEN = os.environ.get("REWARD_TOKEN", "")  # when set, clients must show it before a message is taken

INFO = {
    "protocol": PROTOCOL,
    "server": "plain-pyzmq",
    "rewards": [{"name": "share_of_ones", "version": "1", "scope": "episode", "wants": []}],
    "limits": {"max_inputs": 64, "max_body_bytes": 8 << 20, "max_in_flight": 8},
}


def share_of_ones(given, digit="1"):
    """The reward: the share of the digit 1 in the response. Returns a verdict for one input."""
    response = given["response"]
    value = response.count(digit) / max(1, len(response))
    return {"type": "score", "value": value, "components": {"length": len(response)}}


def judge(given, args):
    """One input's verdict. What raises is an error with its text, never a score of 0."""
    try:
        return share_of_ones(given, **args)
    except Exception as error:
        return {"type": "error", "kind": "exception", "message": f"{type(error).__name__}: {error}"}


def answer(request):
    if request["op"] == "info":
        return INFO
    if request["op"] == "health":
        return {"status": "ready", "in_flight": 0, "capacity": 0}
    if request["protocol"] != PROTOCOL:
        return refusal("protocol", f"this server speaks {PROTOCOL}")
    if request["reward"] != "share_of_ones":
        return refusal("unknown_reward", f"no reward {request['reward']}")
    return {"verdicts": [judge(given, request.get("args", {})) for given in request["inputs"]]}


def refusal(kind, message):
    return {"error": {"kind": kind, "message": message, "retry_after_ms": 0}}


def main():
    context = zmq.Context()
    socket = context.socket(zmq.REP)
    socket.linger = 0
    if TOKEN:
        door = ThreadAuthenticator(context)
        door.start()
        door.configure_plain(passwords={"reward": TOKEN})
        socket.plain_server = True
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    socket.bind(f"tcp://127.0.0.1:{port or '*'}")
    print("serves", socket.getsockopt_string(zmq.LAST_ENDPOINT), flush=True)
    while True:
        body = socket.recv()
        try:
            request = msgpack.unpackb(body)
            reply = {"request_id": request["request_id"], **answer(request)}
        except (ValueError, KeyError, TypeError, msgpack.UnpackException) as error:
            reply = {"request_id": "", **refusal("invalid", f"the message is no request: {error}")}
        socket.send(msgpack.packb(reply))


if __name__ == "__main__":
    main()
