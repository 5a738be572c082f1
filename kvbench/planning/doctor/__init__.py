"""``kvbench doctor``: will it work here, before anything is started?"""
