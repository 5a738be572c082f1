"""A server with an exact schedule: what a client should have measured is known, token by token.

``python -m kvbench.processes.exact_server SPEC.json`` answers streamed OpenAI completions. The first token of
a request is due ``first_token_s`` after the kernel received its last byte, each further one ``gap_s`` later;
or, with ``queue: "md1"``, requests are served one at a time in ``service_s`` each, which under Poisson
arrivals is an M/D/1 queue whose answer is known (``tools/known_queues.py``). When each token was
really written is kept beside when it was due, so that a client's error and the server's own lateness are told
apart.

Pure Python, one thread, an epoll loop of its own: one ``send`` a token, of bytes made beforehand. GET /log
lists what was done, GET /metrics counts it under vLLM's names. ``trouble`` makes it misbehave, each kind on
a real socket.
"""
