"""What runs in the simulator's interpreter. Python 3.8; imports `ipc`, and one simulator in one file."""
