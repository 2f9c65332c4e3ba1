"""Each annotation's values: what is taken, what is refused, and what goes together."""

from __future__ import annotations

import pytest
from slotcar_injector.annotations import ANNOTATIONS, Request, request_of
from slotcar_injector.denial import Denied, Reason
from slotcar_injector.values import Mount, Named, size_flag

PREFIX = "slotcar.dev/"


def read(defaults: dict[str, str] | None = None, **annotations: str) -> Request:
    named = {PREFIX + name.replace("_", "-"): text for name, text in annotations.items()}
    return request_of(named, {"image": "slotcar:1"} | (defaults or {}))


FIT = {
    "slots": [("1", 1), ("4096", 4096)],
    "max-rank": [("65536", 65536)],
    "host-bytes": [("1024", 1024), ("1.5Gi", 3 << 29), ("2G", 2 * 10**9), ("1k", 1000)],
    "cpu-limit": [("1", 1000), ("250m", 250), ("0.5", 500), ("1.125", 1125)],
    "planes": [("stream", ("stream",)), ("ring , stream", ("ring", "stream"))],
    "adapters": [("set", Named("set", "adapters.yaml")), ("a.b/c.yaml", Named("a.b", "c.yaml"))],
    "roots": [("v:/a", (Mount("v", "", "/a"),)), ("v/x/y:/a/b", (Mount("v", "x/y", "/a/b"),))],
    "gpu-claim": [("gpu", Named("gpu", "")), ("gpu/one", Named("gpu", "one"))],
    "sources": [("hf://org/*, s3://b/p", ("hf://org/*", "s3://b/p"))],
    "image": [("r:5000/a/b@sha256:" + "0" * 64, "r:5000/a/b@sha256:" + "0" * 64)],
}
UNFIT = {
    "inject": ["yes", "True", ""],
    "container": ["Engine", "a b", "-a", "a" * 64, ""],
    "init-containers": ["a,,b", "a,a", ""],
    "mode": ["sidecar", ""],
    "image": ["", "a b", "$(X)", "a\nb", "-a"],
    "slots": ["0", "4097", "8.0", "-1", "+8", " 8", "8 ", "٨", "1e3", "0x8", "9" * 400],
    "max-rank": ["0", "65537"],
    "dtype": ["fp16", "bf16", "float64"],
    "planes": ["direct,direct,stream", "grpc", ""],
    "gpu-claim": ["gpu/", "/one", "a/b/c"],
    "host-bytes": ["0", "4GiB", "4gi", "-1Gi", "1m", "0.5", "1e9", "4 Gi", "4Gi\n", "", "NaN", "Infinity", "1Ei"],
    "disk-bytes": ["none", "0"],
    "ring-bytes": ["0Mi"],
    "hub-cache-bytes": ["all"],
    "roots": ["/srv", "v", "v:", "v:srv", "v:/a/../b", "v:/a/.hidden", "v/../x:/a", "v:/a//b", "v:/a/", "v/:/a", "v:/"],
    "sources": ["hf:/org", "org/name", "file://x y", "HF://x", "s3://b?x"],
    "source-options": ["S", "s/..", "s/a/b", "s/", "/k"],
    "adapters": ["a_b", "a/.."],
    "policy": ["who/"],
    "model-spec": [""],
    "base-model": ["m", "m:/etc"],
    "cpu-request": ["0", "0m", "1.5m", "-1", "1,5", ""],
    "cpu-limit": ["100%"],
    "memory-request": ["1GB"],
    "memory-limit": ["1 GiB"],
    "metrics-port": ["80", "65536", "http"],
    "health-port": ["9464"],
    "status-page": ["on"],
    "log-level": ["trace"],
    "log-format": ["text"],
}


@pytest.mark.parametrize(("name", "text", "value"), [(name, *each) for name, every in FIT.items() for each in every])
def test_what_fits_is_read(name: str, text: str, value: object) -> None:
    request = request_of({PREFIX + name: text}, {"image": "slotcar:1"})
    found = getattr(request, name.replace("-", "_"))
    assert getattr(found, "amount", found) == value


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, every in UNFIT.items() for text in every])
def test_what_does_not_fit_is_refused_with_its_name(name: str, text: str) -> None:
    with pytest.raises(Denied) as error:
        request_of({PREFIX + name: text}, {"image": "slotcar:1"})
    assert error.value.reason is Reason.ANNOTATION_INVALID
    assert ", wanted " in str(error.value)
    assert len(str(error.value)) < 500
    assert str(error.value).isprintable()


def test_every_annotation_has_values_that_do_not_fit() -> None:
    assert set(UNFIT) == {each.name for each in ANNOTATIONS}


@pytest.mark.parametrize(("name", "near"), [("slot", "slots"), ("maxrank", "max-rank"), ("Image", "image")])
def test_a_slip_is_told_what_was_meant(name: str, near: str) -> None:
    with pytest.raises(Denied, match=f"did you mean slotcar.dev/{near}"):
        request_of({PREFIX + name: "1"}, {})


def test_an_unknown_name_that_is_near_nothing_gets_the_list() -> None:
    with pytest.raises(Denied, match="wanted one of adapters, base-model, container"):
        request_of({PREFIX + "zzzzzzzz": "1"}, {})


def test_others_annotations_are_not_read() -> None:
    assert request_of({"x.slotcar.dev/slots": "many", "slots": "few", "slotcar.dev": "x"}, {"image": "i"}).slots == 8


def test_an_annotation_goes_before_the_injector_s_default_and_that_before_ours() -> None:
    assert read().slots == 8
    assert read({"slots": "3"}).slots == 3
    assert read({"slots": "3"}, slots="4").slots == 4


def test_an_image_is_needed() -> None:
    with pytest.raises(Denied, match=r"slotcar\.dev/image is missing"):
        request_of({}, {})


CONTRADICTIONS = {
    "planes without stream": ({"planes": "ring,direct"}, "stream among them"),
    "one port": ({"metrics_port": "9999", "health_port": "9999"}, "another port"),
    "cpu": ({"cpu_request": "2", "cpu_limit": "1500m"}, "cpu-request is 2, wanted at most cpu-limit"),
    "memory": ({"memory_request": "8Gi", "memory_limit": "4Gi"}, "at most memory-limit, 4Gi"),
    "default request above limit": ({"cpu_limit": "50m"}, "cpu-request is 100m"),
    "two volumes at a path": ({"roots": "a:/srv,b:/srv"}, "a path for each volume"),
    "a root at the model's path": ({"roots": "a:/srv", "base_model": "b:/srv"}, "a path for each volume"),
    "the sockets' path": ({"roots": "a:/run/slotcar"}, "apart from"),
    "beneath the temporary files": ({"roots": "a:/tmp/x"}, "apart from"),
    "above the disk tier": ({"roots": "a:/var/lib"}, "apart from"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_values_that_do_not_go_together_are_refused(name: str) -> None:
    annotations, part = CONTRADICTIONS[name]
    with pytest.raises(Denied, match=part) as error:
        read(**annotations)
    assert error.value.reason is Reason.ANNOTATION_INVALID


def test_the_memory_limit_has_room_for_all_that_is_known() -> None:
    least = (4 << 30) + (1 << 30) + (16 << 20) + (512 << 20)
    given = {"host_bytes": "4Gi", "ring_bytes": "1Gi"}
    assert read(**given, memory_limit=str(least)).memory_limit
    with pytest.raises(Denied) as error:
        read(**given, memory_limit=str(least - 1))
    assert error.value.reason is Reason.MEMORY_TOO_SMALL
    assert "5648Mi" in str(error.value)
    assert read(**given, planes="stream", memory_limit=str(least - (1 << 30))).memory_limit


@pytest.mark.parametrize(("amount", "text"), [(1, "1"), (1024, "1KiB"), (3 << 29, "1536MiB"), (10**9, "1000000000")])
def test_sizes_are_said_in_the_sidecar_s_form(amount: int, text: str) -> None:
    assert size_flag(amount) == text
