"""A server with an exact schedule: the correct measurement is known for every token.

``python -m kvbench.processes.exact_server SPEC.json`` answers streamed OpenAI completions. The first token of
a request is due ``first_token_s`` after the kernel received its last byte, each further one ``gap_s`` later.
With ``queue: "md1"`` requests are served one at a time in ``service_s`` each: under Poisson arrivals an M/D/1
queue with a known solution (``tools/known_queues.py``). The log has due and real write times, which separates
the client's error from the server's lateness. Pure Python, one thread, an epoll loop: one ``send`` per token,
of bytes made beforehand. GET /log lists the requests, GET /metrics counts them under vLLM's names.
``trouble`` makes the server misbehave, each kind on a real socket."""
