"""Run by the Python of an environment with vLLM: print its KV events, a line of JSON each.

in_vllm_listener.py ENDPOINT
"""

import json
import sys

import msgspec
import zmq

reader = zmq.Context.instance().socket(zmq.SUB)
reader.subscribe(b"")
reader.connect(sys.argv[1])
print("listening", flush=True)
while True:
    _topic, number, payload = reader.recv_multipart()
    for event in msgspec.msgpack.decode(payload)[1]:
        print(json.dumps(event | {"batch": int.from_bytes(number, "big")}), flush=True)
