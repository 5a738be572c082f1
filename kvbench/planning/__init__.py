"""A scenario file and options → Scenario → Plan; process specs, manifests, and first scenarios."""
