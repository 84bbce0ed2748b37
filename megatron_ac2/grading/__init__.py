"""Rewards from text that nobody may trust (docs/security.md): an answer is found, read and compared apart from the run.

answers.py finds the final answer of a response; expressions.py says which answers may be computed with; verifiers.py
compares one; held_modules.py keeps what that may import; confinement.py shuts a process in; server.py is that process;
pool.py hands it answers and waits no longer than allowed; rules.py is the grader that the loop knows.
"""
