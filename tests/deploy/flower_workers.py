"""Workers that listen at addresses, for tests of Flower."""

import queue
import threading
from contextlib import contextmanager

from bayesfed.deploy.sockets import serve


@contextmanager
def workers(*addresses, handle=bytes.upper):
    stop, ready = threading.Event(), queue.Queue()
    threads = [
        threading.Thread(
            target=serve, args=(address, handle), kwargs={"ready": ready.put, "stop": stop}
        )
        for address in addresses
    ]
    for thread in threads:
        thread.start()
    try:
        yield [ready.get(timeout=5) for _ in threads]
    finally:
        stop.set()
        for thread in threads:
            thread.join(5)
