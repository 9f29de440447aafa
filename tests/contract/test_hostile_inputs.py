"""Each case about images, sources, names and first-boot data has its outcome, and a test of it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
_IMAGED = "services/imaged/tests"
_AGENT = "services/nodeagent/tests"
_HEADERS = f"{_IMAGED}/test_headers.py"
_CONVERSION = f"{_IMAGED}/test_conversion.py"
_NAMES = f"{_IMAGED}/test_names_and_sources.py"
_PULLS = f"{_IMAGED}/test_pulls.py"
_SOURCES = f"{_IMAGED}/test_pull_sources.py"
_REGISTRIES = f"{_IMAGED}/test_registries.py"
_CONTAINERS = f"{_IMAGED}/test_containers.py"
_UPLOADS = f"{_IMAGED}/test_uploads.py"
_ADDRESSES = f"{_IMAGED}/test_addresses.py"
_MODELS = "schemas/tests/test_models.py"
_NEEDS_MORE = f"{_HEADERS}::test_images_that_need_more_than_themselves_are_refused"
_UNLISTED = f"{_HEADERS}::test_data_that_is_neither_qcow2_nor_raw_is_refused"
_CONVERTED = f"{_CONVERSION}::test_a_foreign_image_is_stored_as_our_qcow2"
_ONE_FILE = f"{_CONTAINERS}::test_a_file_that_is_no_disk_is_refused_and_nothing_stays"
_LIES = f"{_REGISTRIES}::test_manifests_that_lie_are_refused"
_EVICTED = f"{_IMAGED}/test_quota.py::test_disks_made_while_images_are_evicted_have_their_images"
_FULL = (
    f"{_IMAGED}/test_full_disks.py"
    "::test_a_disk_that_lies_about_its_space_fails_an_operation_clearly"
)
_NOT_CONNECTED = (
    f"{_ADDRESSES}::test_a_server_on_loopback_is_never_connected_to_unless_it_is_allowed"
)

SHOWN_BY = {
    "IMG-01": _NEEDS_MORE,
    "IMG-02": _NEEDS_MORE,
    "IMG-03": f"{_HEADERS}::test_no_tampered_header_passes_with_a_backing_file",
    "IMG-04": f"{_CONVERSION}::test_a_file_that_an_image_names_never_leaks",
    "IMG-05": f"{_CONVERSION}::test_an_image_that_is_not_whole_is_refused",
    "IMG-06": f"{_PULLS}::test_an_image_with_a_backing_file_is_refused_and_leaves_nothing",
    "IMG-07": f"{_IMAGED}/test_exports.py"
    "::test_a_header_that_the_guest_changed_does_not_choose_the_image",
    "IMG-08": f"{_HEADERS}::test_polyglots_are_refused",
    "IMG-09": _UNLISTED,
    "IMG-10": f"{_HEADERS}::test_tampered_qcow2_headers_are_refused",
    "IMG-11": _CONVERTED,
    "IMG-12": f"{_HEADERS}::test_a_virtual_size_bomb_is_refused",
    "IMG-13": f"{_CONVERSION}::test_the_virtual_size_and_the_output_are_bounded",
    "IMG-14": f"{_IMAGED}/test_compressed.py::test_hostile_bodies_are_refused_and_leave_nothing",
    "IMG-15": f"{_IMAGED}/test_sandbox.py::test_time_and_output_are_bounded",
    "IMG-16": f"{_NAMES}::test_each_name_has_its_own_plain_file_name",
    "IMG-17": f"{_IMAGED}/test_sources_named.py::test_a_symlink_in_the_store_is_no_image",
    "IMG-18": f"{_NAMES}::test_digests_are_checked_before_they_become_paths",
    "IMG-19": f"{_PULLS}::test_a_pinned_digest_is_enforced_and_nothing_is_kept",
    "IMG-20": f"{_PULLS}::test_a_hundred_requests_share_one_download_though_half_are_cancelled",
    "IMG-21": f"{_IMAGED}/test_image_deletes.py::test_a_delete_ends_the_downloads_of_an_image",
    "IMG-22": _EVICTED,
    "IMG-23": _FULL,
    "IMG-24": f"{_IMAGED}/test_quota.py::test_the_least_recently_used_images_make_room",
    "IMG-25": "schemas/tests/test_container.py::test_a_path_is_absolute_and_of_a_file",
    "IMG-26": f"{_UPLOADS}::test_an_account_has_a_bounded_number_of_uploads",
    "IMG-27": f"{_UPLOADS}::test_a_name_keeps_its_meaning",
    "SRC-01": f"{_NAMES}::test_a_url_that_is_not_http_is_refused",
    "SRC-02": f"{_SOURCES}::test_redirects_are_checked_hop_by_hop",
    "SRC-03": f"{_ADDRESSES}::test_nothing_is_fetched_from_an_address_that_is_not_public",
    "SRC-04": f"{_ADDRESSES}::test_a_name_is_judged_by_the_address_of_each_connection",
    "SRC-05": _NOT_CONNECTED,
    "SRC-06": f"{_PULLS}::test_a_body_cut_short_is_resumed_by_range",
    "SRC-07": f"{_SOURCES}::test_an_endless_body_ends_at_the_limit",
    "SRC-08": f"{_SOURCES}::test_a_stalled_server_is_abandoned",
    "SRC-09": f"{_SOURCES}::test_an_encoded_body_is_refused",
    "SRC-10": f"{_PULLS}::test_a_resume_that_is_not_a_continuation_starts_over",
    "SRC-11": f"{_PULLS}::test_one_byte_chunks_do_not_stall_the_loop",
    "SRC-12": f"{_REGISTRIES}::test_a_password_is_sent_to_no_unknown_token_server",
    "SRC-13": f"{_REGISTRIES}::test_a_login_does_not_follow_a_redirect_to_another_server",
    "SRC-14": _LIES,
    "SRC-15": f"{_REGISTRIES}::test_a_tag_that_moves_meanwhile_changes_nothing",
    "SRC-16": f"{_IMAGED}/test_archive.py::test_hostile_archives_are_refused",
    "SRC-17": _ONE_FILE,
    "SRC-18": f"{_REGISTRIES}::test_only_the_architecture_of_a_configuration_is_read",
    "SRC-20": f"{_REGISTRIES}::test_an_endless_manifest_is_abandoned",
    "INJ-01": f"{_AGENT}/test_domain_xml.py::test_values_are_only_ever_text_or_attributes",
    "INJ-02": f"{_MODELS}::test_a_hostile_name_is_refused",
    "INJ-03": f"{_MODELS}::test_a_hostile_serial_is_refused",
    "INJ-05": f"{_MODELS}::test_unknown_fields_are_refused_not_ignored",
    "INJ-08": f"{_MODELS}::test_a_hostile_hostname_or_disk_name_is_refused",
    "INJ-10": f"{_AGENT}/test_seed.py::test_an_ssh_key_is_never_more_than_one_value",
    "INJ-14": f"{_AGENT}/test_seed.py::test_any_mapping_comes_back_as_it_was",
}
WITHOUT_A_TEST = {"SRC-19", "INJ-04"}
"""No signature is looked at, and no XML of a tenant is parsed: there is nothing to run."""


def test_each_case_of_an_image_has_an_outcome_and_a_test_that_exists() -> None:
    text = (ROOT / "docs/reference/hostile-inputs.md").read_text(encoding="utf-8")
    rows = set(re.findall(r"^\| ((?:IMG|SRC|INJ)-\d+) \|", text, re.MULTILINE))
    assert rows == SHOWN_BY.keys() | WITHOUT_A_TEST
    assert {f"IMG-{number:02}" for number in range(1, 28)} <= rows
    assert {f"SRC-{number:02}" for number in range(1, 21)} <= rows
    for case, shown_by in SHOWN_BY.items():
        path, _, name = shown_by.partition("::")
        test = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"^(async )?def {name}\(", test, re.MULTILINE), f"{case}: {shown_by}"
