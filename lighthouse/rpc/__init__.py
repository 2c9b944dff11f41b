"""A small gRPC server on asyncio: HTTP/2 as a state machine, calls on top, nothing in C.

It is here because a lighthouse holds thousands of connections that say little: grpcio's server
costs a second socket and about 100 kB for each, and twice the time for each message.
"""
