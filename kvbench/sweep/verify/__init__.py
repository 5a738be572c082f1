"""``kvbench verify``: does a run folder still say what was measured?"""
