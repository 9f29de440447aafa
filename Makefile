# Everything one does here. `make` alone lists it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
BIN := .venv/bin
# More words for pytest or the bench: make unit ARGS='-k claims -x'
ARGS ?=
PYTEST := tools/in-host-netns $(BIN)/python -m pytest
# Services that tests start many times would compile all their modules each time.
unexport PYTHONDONTWRITEBYTECODE
# Each worker has a host of its own; conftest.py says what stays together.
LANES := --dist loadscope --no-loadscope-reorder
# With three, the two processors are idle a fifth of the time: many tests wait for a server or a guest.
WORKERS := $(LANES) --tx '4*popen//python=tools/in-own-host $(BIN)/python'
GENERATE := $(BIN)/python -m virtbus.documents
.PHONY: help setup sync fmt check docs docs-check unit sim debian-image integration e2e test long critest crictl hosts-test upgrade-test demo chaos fuzz bench load kube-load storm compare k8s-tools storage-servers install uninstall clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

setup: ## packages, Python environment, libvirt, guest image: whatever is missing (root)
	@tools/setup

sync: ## only the Python environment
	@tools/uv sync --locked --quiet

fmt: ## format and mend what ruff can
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

check: sync docs-check ## lock, format, lint, types, contracts, edges, prose, class sizes, generated docs
	@tools/uv lock --check
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check . tools/census
	@$(BIN)/mypy
	@$(BIN)/lint-imports
	@$(BIN)/python -m pytest -q tests/contract/test_edges.py tests/contract/test_prose.py
	@$(BIN)/python -m tests.contract.class_sizes

docs: sync ## rewrite what is generated from the code
	@$(GENERATE)

docs-check: sync
	@$(GENERATE) --check

unit: sync ## tests that need nothing but Python
	@$(BIN)/python -m pytest $(LANES) --tx 2*popen -m 'not integration and not e2e and not kubernetes' $(ARGS)

SEEDS ?= 200
SIM := $(BIN)/python -m tests.sim
sim: sync ## deterministic simulation: SEEDS=n seeds, or SEED=k with its whole schedule
	@$(SIM) $(if $(SEED),--seed $(SEED),--seeds $(SEEDS)) $(ARGS)

integration: setup ## tests against real libvirt, NATS and network namespaces (root)
	@$(PYTEST) -m integration $(ARGS)

e2e: setup ## tests that boot real guests (root)
	@$(PYTEST) -m 'e2e and not long' $(ARGS)

test: setup ## all tests but the long ones: a minute of attackers, then the others by four workers (root)
	@$(if $(ARGS),,$(PYTEST) -m alone tests/fuzz)
	@$(BIN)/python -m pytest $(WORKERS) -m 'not long and not alone' $(ARGS)

k8s-tools: ## etcd, kube-apiserver, kubectl, kubelet and containerd for the tests of Kubernetes: minutes once, then no time
	@tools/k8s/build >/dev/null

storage-servers: setup ## servers of network disks and QEMU's drivers for them, for the long tests: a minute once (root)
	@tools/setup --servers

debian-image: setup ## the full guest `debian`: minutes once, then a second (root)
	@images/debian/build $(or $(VIRTBUS_STATE_DIR),/var/lib/virtbus)/images/src/debian.qcow2

long: setup debian-image k8s-tools storage-servers ## the rest: 200 seeds, a full Debian guest, guests on more kinds of pools and networks, three hosts, a kubelet with VM pods, moves, an upgrade, broken wires, repeated messages (root)
	@$(if $(ARGS),,tools/in-own-host $(BIN)/python -m pytest tests/e2e/test_network_disks.py)
	@$(PYTEST) -m long $(if $(ARGS),,--ignore tests/e2e/test_network_disks.py) $(ARGS)

critest: setup k8s-tools ## CRITEST=path, built elsewhere, against containerd and virtbus on one node (root)
	@tools/in-own-host $(BIN)/python -m tests.critest $(CRITEST) $(ARGS)

crictl: setup k8s-tools ## the commands of CRICTL=path, built elsewhere, on a node with both runtimes (root)
	@tools/in-own-host $(BIN)/python -m tests.crictl $(CRICTL) $(ARGS)

hosts-test: setup ## three hosts, three servers of the bus: creates and deletes under kills; VMS= SEED= (root)
	@VMS=$(or $(VMS),100) SEED=$(SEED) $(PYTEST) -s tests/hosts/test_hosts.py $(ARGS)

upgrade-test: setup ## each service at an older commit beside the newer, and back; FROM=commit VMS= (root)
	@FROM=$(or $(FROM),HEAD~1) VMS=$(or $(VMS),20) $(PYTEST) -s tests/hosts/test_upgrade.py $(ARGS)

chaos: setup ## random faults under load, MINUTES=n SEED=s [SIMULATE=1], and what held (root)
	@MINUTES=$(MINUTES) SEED=$(SEED) SIMULATE=$(SIMULATE) tools/in-host-netns $(BIN)/python -m tests.chaos

fuzz: setup ## strangers with every credential, MINUTES=n SEED=s [FROM=turn SHOW=turns KEEP_ON=1]: what it cost others (root)
	@MINUTES=$(MINUTES) SEED=$(SEED) FROM=$(FROM) SHOW=$(SHOW) KEEP_ON=$(KEEP_ON) \
	    tools/in-host-netns $(BIN)/python -m tests.fuzz

kube-load: setup ## VMS=n applied to a real API server, RATE=n a second, NODES=n simulated (root; make k8s-tools)
	@tools/in-host-netns $(BIN)/python -m tests.load.kubernetes --vms $(or $(VMS),1000) \
	    --rate $(or $(RATE),20) --nodes $(or $(NODES),50) $(ARGS)

load: setup ## VMS=n on NODES=n simulated nodes, REPLICAS=1|3 SYNC=always|default CONTROLLERS=n, or VOLUMES=n: what it cost (root)
	@mkdir -p build-out
	@$(if $(VOLUMES),tools/in-host-netns $(BIN)/python -m tests.load.objects --volumes $(VOLUMES) --nodes $(or $(NODES),20) \
	    --controllers $(or $(CONTROLLERS),2) --json build-out/objects.jsonl $(ARGS))
	@$(if $(VOLUMES),,tools/in-host-netns $(BIN)/python -m tests.load --vms $(or $(VMS),10000) --nodes $(or $(NODES),200) \
	    --replicas $(or $(REPLICAS),1) --sync $(or $(SYNC),always) \
	    --controllers $(or $(CONTROLLERS),2) \
	    --json build-out/load.jsonl --plot build-out/load.png $(ARGS))

storm: setup ## GUESTS=n real guests of one host started at once, against plain libvirt; ROUNDS= GUEST=halt|tiny (root)
	@mkdir -p build-out
	@tools/in-host-netns $(BIN)/python -m tests.load.storm --guests $(or $(GUESTS),0) \
	    --rounds $(or $(ROUNDS),5) --guest $(or $(GUEST),halt) --json build-out/storm.jsonl $(ARGS)

compare: setup ## bench, storm and load of OLD="commit commit" and of this tree in turns; ROUNDS= ONLY=word (root)
	@$(BIN)/python -m tests.compare $(addprefix --old ,$(OLD)) $(if $(ROUNDS),--rounds $(ROUNDS)) \
	    $(if $(ONLY),--only $(ONLY)) $(ARGS)

demo: setup ## one VM, from create to delete (root)
	@tools/in-host-netns tools/demo

bench: setup ## the budgets, measured against raw libvirt (root)
	@tools/in-host-netns $(BIN)/python -m tests.bench $(ARGS)

install: ## virtbus and its systemd units onto this host (root)
	@deploy/install

uninstall: ## and off it again; VMs and state stay unless ARGS=--purge (root)
	@deploy/uninstall $(ARGS)

clean: ## what was built or cached in this clone
	@rm -rf .venv build-out dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
