"""The emulated engine: a real server with a real KV cache, whose compute time alone is modelled.

    python -m kvbench.processes.emulator SPEC.json

``spec`` what it is given · ``protocol``, ``answers``, ``server`` its HTTP side · ``engine``,
``running_request`` the steps of ``core.simulation.scheduler`` on the wall clock · ``kvbytes`` the cache's
bytes · ``handoffs`` how they go to another engine · ``metrics`` what it counts.
"""
