"""The emulated engine: a real server with a real KV cache; only its compute time is modelled. ``python -m
kvbench.processes.emulator SPEC.json`` ``spec`` its input · ``protocol``, ``answers``, ``server`` HTTP ·
``engine``, ``running_request`` the steps of ``core.simulation.scheduler`` on the wall clock · ``kvbytes`` the
cache's bytes · ``handoffs`` KV transfer to another engine · ``metrics`` its counters."""
