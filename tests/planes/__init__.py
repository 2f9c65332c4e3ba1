"""The stub of EngineService over any plane, so that one suite runs on each: written against proto/slotcar/shm alone.

`ring` and `direct` are engines of their own without the client library; `stub` puts them behind the stub of gRPC.
"""
