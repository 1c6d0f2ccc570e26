"""A program without torch that determines its rank as a recipe does, and meets the other ranks at
the master port. Rank 0 prints the ranks that arrived.
"""

import json
import os
import socket
import time

from recipekit.spec.ranks import take_rank

take_rank(os.environ)
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
own = [int(os.environ[name]) for name in names]
place = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
if own[0] == 0:
    with socket.create_server(place) as server:
        came = [own]
        while len(came) < own[1]:
            with server.accept()[0] as connection:
                came.append(json.loads(connection.recv(1000)))
    print(json.dumps(sorted(came)), flush=True)
else:
    deadline = time.monotonic() + 30
    while True:
        try:
            with socket.create_connection(place) as connection:
                connection.sendall(json.dumps(own).encode())
            break
        except ConnectionRefusedError:  # rank 0 is not listening yet
            assert time.monotonic() < deadline
            time.sleep(0.05)
