"""The emulated engine: a real server with a real KV cache, whose compute time alone is modelled.

    python -m kvbench.processes.emulator SPEC.json

``spec`` what it is given · ``api``, ``protocol``, ``answers``, ``text`` its HTTP side · ``engine``, ``live``
the steps of ``core.enginemodel`` on the wall clock · ``compute``, ``kvbytes`` the cache's bytes ·
``handoff``, ``pull``, ``push``, ``rpc`` how they go to another engine · ``metrics`` what it counts ·
``server`` all of it together.
"""
