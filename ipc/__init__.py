"""What both interpreters speak. Python 3.8; standard library, numpy, msgpack and posix_ipc only."""
