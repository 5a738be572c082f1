"""``make perf-peers``: the same work through kvbench and its peers, in one run on one machine.

Clients (kvbench's load generator, ``vllm bench serve``, AIPerf, GuideLLM, a few lines of httpx) each send to
an exact server. Routers (kvbench's, ``vllm-router``, a few lines of FastAPI) each stand between kvbench's
load generator and two exact servers, P and D. The truth is known, so each report can be compared with it.
Each peer has an environment in .venv-peers. A peer that cannot be installed or run here is listed with the
reason.
"""
