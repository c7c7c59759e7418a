"""The controller: it takes jobs, lets them wait for their turn, starts, stops and resumes their runs.

What is decided is pure (`states.py`, `line.py`, `resources.py`, `sweeps.py`), what is known lies in a
database (`store.py`), and what is done to processes can be done twice without harm (`attempt.py`,
`processes.py`).
`controller.py` brings the three together; `api.py` is the way in.
"""
