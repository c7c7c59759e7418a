"""The controller: it accepts jobs, queues them, and starts, stops and resumes their runs.

Decisions are pure (`states.py`, `queue.py`, `resources.py`). The state is in a database (`store.py`). Every
action on processes can be repeated without harm (`attempt.py`, `processes.py`). `controller.py` combines the
three, and `api.py` is the entry point."""
