"""The controller: it takes jobs, queues them, and starts, stops and resumes their runs.

Decisions are pure (`states.py`, `queue.py`, `resources.py`), the state is in a database (`store.py`), and
every action on processes can be repeated without harm (`attempt.py`, `processes.py`). `controller.py` brings
the three together; `api.py` is the way in.
"""
