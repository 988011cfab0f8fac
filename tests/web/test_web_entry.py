"""First start, login, logout; an outage of the service; roles."""

from support.browser import PASSWORD
from support.nbdserver import wait_until


def test_the_first_administrator_logs_in_and_out(service, visit):
    visitor = visit(service)
    page = visitor.page
    page.goto(f"/#/setup/{service.setup_secret()}")
    page.get_by_label("Password", exact=False).first.fill("short")
    page.get_by_label("Password again").fill("other")
    page.get_by_text("The passwords differ.").wait_for()
    page.get_by_text("The password has fewer than 10 characters.").wait_for()
    visitor.set_up()
    assert "setup" not in page.url
    visitor.go("access")
    page.get_by_text("1 entry, chain whole").wait_for()
    make_user(page, "secret-name")
    visitor.go("machines")
    page.get_by_text("No machine").or_(page.get_by_text("no repository")).first.wait_for()
    page.get_by_role("button", name="Log out").click()
    page.get_by_label("User").fill("admin")
    assert page.get_by_text("secret-name").count() == 0, "the next one sees no message of the one before"
    page.get_by_label("Password").fill("wrong password")
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("alert").get_by_text("The user or the password is wrong.").wait_for()
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Log in").click()
    page.get_by_role("heading", name="Machines").wait_for()
    assert page.get_by_text("secret-name").count() == 0


def make_user(page, name):
    page.get_by_role("button", name="New user").click()
    form = page.get_by_role("dialog", name="New user")
    form.get_by_label("Name").fill(name)
    form.get_by_label("Password").fill(PASSWORD)
    form.get_by_role("button", name="Save").click()
    page.get_by_text(f"User {name} is saved.").wait_for()


def test_a_used_link_is_reported(service, visit):
    visitor = visit(service)
    secret = service.setup_secret()
    visitor.set_up()
    visitor.context.clear_cookies()
    visitor.page.goto(f"/#/setup/{secret}")
    visitor.page.reload()
    visitor.page.get_by_label("User").fill("stranger")
    visitor.page.get_by_label("Password", exact=False).first.fill(PASSWORD)
    visitor.page.get_by_label("Password again").fill(PASSWORD)
    visitor.page.get_by_role("button", name="Make administrator").click()
    visitor.page.get_by_role("alert").wait_for()


def test_a_revoked_login_leads_to_the_login(service, visit):
    visitor = visit(service)
    visitor.set_up()
    visitor.go("access")
    make_user(visitor.page, "secret-name")
    for login in service.get("logins"):
        assert service.call("DELETE", f"logins/{login['id']}").status == 204
    visitor.page.get_by_role("button", name="Log in").wait_for(timeout=20_000)
    assert visitor.page.get_by_text("secret-name").count() == 0


def test_the_page_reports_an_outage_and_reconnects(service, visit):
    visitor = visit(service)
    visitor.set_up()
    visitor.go("access")
    visitor.page.get_by_role("heading", name="Users").wait_for()
    service.stop()
    visitor.page.get_by_text("The service is away").wait_for(timeout=20_000)
    service.start()
    visitor.page.get_by_text("The service is away").wait_for(state="detached", timeout=30_000)
    # The stream is alive again: a change from elsewhere appears without a reload.
    service.token("viewer", name="made-later")
    visitor.page.get_by_text("made-later", exact=True).wait_for()


def test_each_role_sees_its_pages(service, visit):
    for role, links in {"viewer": ["Machines", "Activity", "Jobs", "Copies", "Repository", "Alarms", "About"],
                        "admin": ["Machines", "Activity", "Jobs", "Copies", "Repository", "Hosts", "Access", "Alarms", "About"],
                        "backup": ["Activity", "About"], "metrics": ["About"]}.items():
        service.post("users", {"name": f"bo-{role}", "role": role, "password": PASSWORD})
        visitor = visit(service)
        visitor.log_in(f"bo-{role}")
        visitor.go("about")
        visitor.page.get_by_role("heading", name="About").wait_for()
        shown = visitor.page.get_by_role("navigation").get_by_role("list").first.get_by_role("link")
        assert [text.strip() for text in shown.all_inner_texts()] == links, role
        visitor.go("machines")
        if "Machines" in links:
            visitor.page.get_by_role("heading", name="Machines").wait_for()
        else:
            visitor.page.get_by_text("need another role").wait_for()
        assert visitor.page.get_by_text("The service is away").count() == 0, role


def goes_to_jobs(page):
    """The second key counts for 1.2 s after the first: between them a busy machine may need longer."""
    page.keyboard.type("gj")
    return page.get_by_role("heading", name="Jobs").count() > 0


def test_keys_reach_everything(service, visit):
    visitor = visit(service)
    visitor.set_up()
    page = visitor.page
    visitor.go("about")
    page.reload()
    page.get_by_role("heading", name="About").wait_for()
    page.keyboard.press("Tab")
    skip = page.get_by_role("link", name="To the content")
    assert skip.evaluate("link => link === document.activeElement && link.getBoundingClientRect().width > 50")
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").get_by_text("Search machines").wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    wait_until(lambda: goes_to_jobs(page), "the jobs")
    page.keyboard.press("/")
    page.get_by_role("heading", name="Machines").wait_for()
    page.wait_for_function("document.activeElement.type === 'search'")
    # A dialog keeps the focus inside, and gives it back.
    page.keyboard.press("Tab")
    visitor.go("access")
    opener = page.get_by_role("button", name="New user")
    opener.focus()
    page.keyboard.press("Enter")
    page.get_by_role("dialog").wait_for()
    for _ in range(12):
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body || document.activeElement.closest('dialog') !== null")
    page.keyboard.press("Escape")
    page.get_by_role("dialog").wait_for(state="detached")
    assert opener.evaluate("button => button === document.activeElement")
