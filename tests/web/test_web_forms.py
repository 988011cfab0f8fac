"""Forms: users, tokens, targets, jobs. Created objects work; refusals of the API are shown in the form."""

import json
import re

import pytest

from support.browser import PASSWORD
from support.sinks import MailSink, WebSink


@pytest.fixture
def admin(service, visit):
    visitor = visit(service)
    visitor.set_up()
    return visitor


def row(page, text):
    return page.get_by_role("row").filter(has_text=text)


def confirm(page, action):
    page.get_by_role("dialog").get_by_role("button", name=action, exact=True).click()
    page.get_by_role("dialog").wait_for(state="detached")


def test_a_user_is_created_changed_and_removed(service, admin, visit):
    page = admin.page
    admin.go("access")
    users = page.get_by_role("region", name="Users")
    users.get_by_role("button", name="New user").click()
    form = page.get_by_role("dialog", name="New user")
    form.get_by_label("Name").fill("Auditor <b>")
    form.get_by_label("Password").fill(PASSWORD)
    form.get_by_label("Role").select_option("viewer")
    form.get_by_role("button", name="Save").click()
    form.get_by_role("alert").get_by_text("is not a user name: give 1 to 64 of a-z").wait_for()
    form.get_by_label("Name").fill("auditor")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    row(users, "auditor").get_by_text("viewer").wait_for()

    other = visit(service)
    other.log_in("auditor")
    other.go("about")
    other.page.get_by_text("auditor, role viewer").wait_for()
    row(users, "auditor").get_by_role("button", name="Change").click()
    form = page.get_by_role("dialog", name="User auditor")
    form.get_by_label("Role").select_option("operator")
    form.get_by_label("New password").fill("another password")
    form.get_by_role("button", name="Save").click()
    row(users, "auditor").get_by_text("operator").wait_for()
    assert {user["name"]: user["role"] for user in service.get("users")} == {"admin": "admin", "auditor": "operator"}
    visit(service).log_in("auditor", "another password")

    row(users, "auditor").filter(has_text="operator").get_by_role("button", name="Remove").click()
    confirm(page, "Remove")
    row(users, "operator").wait_for(state="detached")
    assert other.context.request.get("/api/v1/me").status == 401
    other.page.get_by_role("button", name="Log in").wait_for(timeout=20_000)
    # The last administrator stays, and the page says why.
    row(users, "(you)").get_by_role("button", name="Remove").click()
    confirm(page, "Remove")
    page.get_by_text("administrator").last.wait_for()
    assert [user["name"] for user in service.get("users")] == ["admin"]


def test_users_change_their_own_password(service, admin, visit):
    service.post("users", {"name": "auditor", "role": "viewer", "password": PASSWORD})
    other = visit(service)
    other.log_in("auditor")
    other.go("about")
    other.page.get_by_role("button", name="Change password").click()
    form = other.page.get_by_role("dialog")
    form.get_by_label("Password until now").fill("not this one")
    form.get_by_label("New password").fill("quite another one")
    form.get_by_role("button", name="Change it").click()
    form.get_by_role("alert").get_by_text("own_password is wrong").wait_for()
    form.get_by_label("Password until now").fill(PASSWORD)
    form.get_by_role("button", name="Change it").click()
    form.wait_for(state="detached")
    visit(service).log_in("auditor", "quite another one")


def test_a_token_is_created_used_and_revoked(service, admin):
    page = admin.page
    admin.go("access")
    page.get_by_role("button", name="New token").click()
    form = page.get_by_role("dialog", name="New token")
    form.get_by_label("What it is for").fill("ci")
    form.get_by_label("Role").select_option("operator")
    form.get_by_label("Machines").fill("web* [")
    form.get_by_role("button", name="Make token").click()
    form.get_by_role("alert").wait_for()
    form.get_by_label("Machines").fill("web* db01")
    form.get_by_role("button", name="Make token").click()
    page.get_by_text("It is shown only once.").wait_for()
    text = page.get_by_role("dialog").locator("code").inner_text()
    page.get_by_role("button", name="Done").click()

    me = service.get("me", token=text, over="https")
    assert (me["role"], me["machines"]) == ("operator", ["web*", "db01"])
    assert service.call("GET", "users", token=text, over="https").status == 403
    assert text not in page.content()
    row(page, "ci by admin").get_by_role("button", name="Revoke").click()
    confirm(page, "Revoke")
    page.get_by_text("No token.").wait_for()
    assert service.call("GET", "me", token=text, over="https").status == 401


def test_a_webhook_is_created_tested_and_removed(service, admin):
    page = admin.page
    admin.go("notifications")
    with WebSink() as sink:
        page.get_by_role("button", name="New target").click()
        form = page.get_by_role("dialog", name="New target")
        form.get_by_label("Name").fill("On call")
        form.get_by_label("Way").select_option("webhook")
        form.get_by_label("URL").fill("ftp://127.0.0.1/hook")
        form.get_by_role("button", name="Save").click()
        form.get_by_role("alert").get_by_text("only https and http are known").wait_for()
        form.get_by_label("URL").fill(sink.url)
        form.get_by_label("Token").fill("t0ken")
        form.get_by_role("button", name="Save").click()
        form.wait_for(state="detached")
        row(page, "On call").get_by_role("button", name="Test").click()
        page.get_by_text("On call: sent").wait_for()
        _, headers, body = sink.requests.get(timeout=10)
        assert "t0ken" in headers["Authorization"] and "this is a test" in json.loads(body)["text"]
        # The stored token stays if the field stays empty.
        row(page, "On call").get_by_role("button", name="Edit").click()
        form = page.get_by_role("dialog", name="On call")
        assert form.get_by_label("Token").input_value() == ""
        form.get_by_label("Name").fill("Night shift")
        form.get_by_role("button", name="Save").click()
        form.wait_for(state="detached")
        # All usual topics, also those of later versions: no list of them is stored.
        assert "topics" not in service.get("notifications/targets")[0]
        row(page, "Night shift").get_by_role("button", name="Test").click()
        assert "t0ken" in sink.requests.get(timeout=10)[1]["Authorization"]
    row(page, "Night shift").get_by_role("button", name="Remove").click()
    confirm(page, "Remove")
    page.get_by_text("None yet").wait_for()


def test_a_mail_target_is_created_and_reports_failures(admin):
    page = admin.page
    admin.go("notifications")
    with MailSink() as sink:
        page.get_by_role("button", name="New target").click()
        form = page.get_by_role("dialog", name="New target")
        form.get_by_label("Port").fill(str(sink.port))
        for label, text in {"Name": "Mail", "Server": "127.0.0.1", "From": "coldrise@example.org", "To one": "ops@example.org"}.items():
            form.get_by_role("textbox", name=label).fill(text)
        form.get_by_label("Encryption").select_option("none")
        form.get_by_role("button", name="Save").click()
        row(page, "Mail").get_by_role("button", name="Test").click()
        page.get_by_text("Mail: sent").wait_for()
        assert b"this is a test" in sink.mails.get(timeout=10)
    row(page, "Mail").get_by_role("button", name="Test").click()
    row(page, "Mail").get_by_text("refused").wait_for()


def test_a_job_is_made_started_and_removed(service, admin, tmp_path):
    page = admin.page
    admin.go("jobs")
    page.get_by_text("No job yet").wait_for()
    page.get_by_role("button", name="New job").click()
    form = page.get_by_role("dialog", name="New job")
    form.get_by_label("Name").first.fill("nightly")
    form.get_by_role("textbox", name="Machines").fill("web01\ndb01")
    form.get_by_label("Disk 1: source").fill(f"raw:{tmp_path}/{{machine}}.raw")
    form.get_by_label("Schedule").fill("Mon..Fri 25:00")
    form.get_by_role("button", name="Save").click()
    form.get_by_role("alert").get_by_text("25:00").wait_for()
    form.get_by_label("Schedule").fill("Mon..Fri 22:00")
    form.get_by_role("button", name="Save").click()
    form.wait_for(state="detached")
    [job] = service.get("jobs")
    assert (job["name"], job["machines"], job["schedule"]) == ("nightly", ["web01", "db01"], ["Mon..Fri 22:00"])
    assert job["disks"] == {"vda": f"raw:{tmp_path}/{{machine}}.raw"}
    page.get_by_role("heading", name="nightly").wait_for()
    page.get_by_role("button", name="Remove").click()
    confirm(page, "Remove")
    page.get_by_text("No job yet").wait_for()
    assert service.get("jobs") == []


# Sparse and full jobs of each kind, also with fields that the form does not show.
JOBS = [
    {"kind": "backup", "machines": ["web01"], "disks": {"vda": "raw:/srv/web01.raw"}},
    {"kind": "backup", "machines": ["web01"], "from": "qmp:/run/{machine}.qmp", "push": True, "agent": "/run/{machine}.agent"},
    {"kind": "backup", "machines": ["Server, Berlin*", "db01"], "from": "libvirt", "quiesce": True, "disks_of": {"db01": {}}},
    {"kind": "backup", "machines": ["db01"], "from": "libvirt:db", "disks": {"vda": "sda"}, "retention": {"keep_within": "7d"},
     "boot_check": {"when": "always", "check_port": 22}, "retries": 0, "retry_seconds": 5, "enabled": False, "window": "22:00-06:00",
     "rate_bytes_per_second": 100_001, "age_limit_hours": 7, "parallel": 2},
    {"kind": "check-boot", "machines": ["Server, Berlin*"]},
    {"kind": "verify", "sample_percent": 0.3},
    {"kind": "prune", "retention": {"keep_last": 3}},
    {"kind": "copy", "to": "/mnt/second"},
    {"kind": "copy", "to": "/mnt/third", "all": True, "follows": "points", "last": 2, "prefix": "a-", "rate_windows": ["08:00-18:00=5M"],
     "behind_limit_minutes": 60, "to_passphrase_file": "/etc/second"},
    {"kind": "protect-live", "machines": ["web01"], "from": "libvirt"},
    {"kind": "protect-live", "machines": ["db01"], "from": "libvirt:db", "disks": {"vda": "sda"}, "push": True, "enabled": False,
     "every_seconds": 10, "consistent_every_minutes": 15, "lag_limit_seconds": 90, "retries": 0, "retry_seconds": 5},
    {"kind": "protect-live", "machines": ["web01", "db01"], "from": "qmp:/run/{machine}.qmp", "agent": "/run/{machine}.agent",
     "consistent_every_minutes": 15},
    {"kind": "gc"},
]


def test_an_edited_job_keeps_what_was_not_changed(service, admin):
    page = admin.page
    for number, job in enumerate(JOBS):
        service.post("jobs", {"name": f"job{number}", **job})

    def stored():
        return {job["name"]: {field: value for field, value in job.items() if field != "next_ms"} for job in service.get("jobs")}

    before = stored()
    admin.go("jobs")
    for name in before:
        page.get_by_role("article").filter(has=page.get_by_role("heading", name=name, exact=True)).get_by_role("button", name="Edit").click()
        form = page.get_by_role("dialog", name=f"Job {name}")
        if name == "job0":
            assert form.get_by_label("Boot check after a backup").input_value() == "never"
        form.get_by_role("textbox", name=re.compile("^(Schedule|Restore points)")).fill("Sat 04:00")
        form.get_by_role("button", name="Save").click()
        form.wait_for(state="detached")
    assert stored() == {name: {**job, "schedule": ["Sat 04:00"]} for name, job in before.items()}
