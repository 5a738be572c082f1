"""``make perf-peers``: the same work through kvbench and its peers, in one run on one machine.

Clients: kvbench's load generator, ``vllm bench serve``, AIPerf, GuideLLM and a few lines of httpx, each
against a server with an exact schedule of its own (``kvbench.processes.exact_server``). Routers: kvbench's,
``vllm-router`` and a few lines of FastAPI and httpx, each between kvbench's load generator and two exact
servers, P and D. What is true is known, so what each reports can be compared with it.

Each peer has an environment of its own in .venv-peers, made from the package registry. A benchmark, not a
test: a peer that cannot be had or run here is listed with the reason.
"""
