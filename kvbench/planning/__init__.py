"""Scenario files and options → Scenario → Plan; process specs, manifests, new scenarios."""
