"""Fixtures that the end-to-end tests share."""

import ctypes
import functools
import os
import pathlib
import shutil
import signal
import sys
import tempfile

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parent))

from support import browser, suite  # noqa: E402
from support.certificates import client_context, make_certificates  # noqa: E402
from support.cli import NBDKIT_PLUGIN, PROGRAM, Coldrise  # noqa: E402
from support.far_site import FarSite  # noqa: E402
from support.image import Image  # noqa: E402
from support.messages import Jobs, add, webhook  # noqa: E402
from support.mounted import Mounted  # noqa: E402
from support.nbdserver import Nbdkit, wait_until  # noqa: E402
from support.network import Network  # noqa: E402
from support.nfsserver import NfsServer  # noqa: E402
from support.service import Coldrised  # noqa: E402
from support.sinks import WebSink  # noqa: E402
from support.wallclock import BothClocks  # noqa: E402

# Also under nohup: programs would leave the signal ignored.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

MIB = 1 << 20

# Disks of megabytes are made and freed all the time. Freed memory stays with this process: the kernel would clear each page
# again, which takes as long as all that tests do in Python. The thresholds of glibc for mmap and for trimming.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1024 * MIB)
ctypes.CDLL(None).mallopt(M_TRIM_THRESHOLD, 256 * MIB)

# Tests record no runs in this machine's folder.
os.environ["COLDRISE_RUNS"] = "none"


def pytest_addoption(parser):
    group = parser.getgroup("crash", "the crash test")
    group.addoption("--crash-kills", type=int, default=16, help="kills of the server (16)")
    group.addoption("--crash-cuts", type=int, default=4, help="power cuts (4)")
    group.addoption("--crash-reopenings", type=int, default=15, help="openings of a session (15)")
    group.addoption("--mutations", type=int, default=70, help="mutations of files (70; 0: all)")
    group.addoption("--mutation-positions", type=int, default=20, help="positions in each file (20)")
    group.addoption("--mutation-files", default="*", help="which files, as a pattern such as layers/* (*)")
    group.addoption("--mutation-seed", type=int, default=7, help="which positions (7)")
    group.addoption("--faults", type=int, default=16, help="file operations that fail (16; 0: all)")
    group.addoption("--kills", type=int, default=16, help="kills at file operations (16)")
    group.addoption("--fault-seed", type=int, default=11, help="which ones (11)")
    group.addoption("--fault-operation", help="of this operation only")
    group.addoption("--fault-family", help="at calls of this kind only: see support/faults.py")
    group.addoption("--gc-kills", type=int, default=30, help="kills of a gc (30)")
    group.addoption("--gc-seed", type=int, help="repeat the gcs of this seed")
    group.addoption("--hostile-clients", type=int, default=140, help="NBD clients that break off (140)")
    group.addoption("--boot-files", type=int, default=1, help="files that a guest boots from (1; of 7)")
    group.addoption("--service-kills", type=int, default=12, help="kills of the service (12)")
    group.addoption("--idle-connections", type=int, default=1500, help="connections that ask nothing (1500)")
    group.addoption("--libvirt-backups", type=int, default=6, help="backups of a libvirt domain under load (6)")
    group.addoption("--api-examples", type=int, default=5, help="generated requests per operation (5)")
    group.addoption("--copy-kills", type=int, default=12, help="copies over a line that are disturbed (12)")
    group.addoption("--copy-seed", type=int, help="repeat the disturbed copies of this seed")
    group.addoption("--mark-kills", type=int, default=10, help="disturbances of time marks at two sites (10)")
    group.addoption("--mark-seed", type=int, help="repeat the disturbances of this seed")
    group.addoption("--bucket-kills", type=int, default=8, help="copies to a bucket that are killed (8)")
    group.addoption("--garage", help="a program of Garage, on which the tests of buckets that allow it run")
    group.addoption("--bucket-seed", type=int, help="repeat the killed copies of this seed")
    group.addoption("--stranger-connections", type=int, default=400, help="strangers at the port for copies (400)")
    group.addoption("--crash-seed", type=int, help="repeat the run of this seed")


def pytest_sessionstart(session):
    missing = [str(path) for path in (PROGRAM, NBDKIT_PLUGIN) if not path.exists()]
    if missing:
        pytest.exit(f"build first (make): {', '.join(missing)} is missing", returncode=1)


def pytest_configure(config):
    config.addinivalue_line("markers", "encrypted: the fresh repository is encrypted")
    config.pluginmanager.register(suite.Worker())
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(suite.Recorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    return suite.lanes(config, log)


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item):
    report = (yield).get_result()
    item.is_failed = getattr(item, "is_failed", False) or report.failed


@pytest.fixture
def tmp_path(tmp_path, request):
    """pytest's, removed after a test that passed: together the tests write tens of gigabytes."""
    yield tmp_path
    if not request.node.is_failed:
        shutil.rmtree(tmp_path, ignore_errors=True)


@pytest.fixture(scope="session")
def template(tmp_path_factory):
    """An empty repository: to copy it takes a tenth of the processor time of `init`."""
    program = Coldrise(tmp_path_factory.mktemp("template") / "repository")
    program.init("--no-encryption")
    return program.repository


@pytest.fixture
def coldrise(request, tmp_path, template):
    """A fresh repository; encrypted for tests that are marked so: each command opens it 30 ms later."""
    if request.node.get_closest_marker("encrypted"):
        program = Coldrise.encrypted(tmp_path)
        program.init()
    else:
        program = Coldrise.copied(template, tmp_path / "repository")
    yield program
    program.end()


@pytest.fixture
def image():
    """A small disk of stored parts and holes, with a short last sector.

    [0, 1 MiB) stored, [1, 5) hole, [5, 6) stored, [6, 8) hole, then 512 bytes
    stored.
    """
    disk = Image(8 * MIB + 512)
    disk.fill(0, MIB, "first")
    disk.fill(5 * MIB, MIB, "second")
    disk.fill(8 * MIB, 512, "last")
    return disk


@pytest.fixture
def point(coldrise, image, tmp_path):
    """The address of a restore point of machine web01 whose disk vda is `image`."""
    return coldrise.backup("web01", vda=image.save(tmp_path / "vda.raw"))


@pytest.fixture
def live(coldrise, point):
    """The export name of that disk, published as session trial."""
    return coldrise.publish(point, "trial")["vda"]


@pytest.fixture
def nbdkit(coldrise, tmp_path):
    """Starts nbdkit on the repository; all servers are stopped at the end."""
    servers = []

    def start(*parameters, **keywords):
        directory = tmp_path / f"nbdkit{len(servers)}"
        server = Nbdkit(coldrise, directory, *parameters, **keywords)
        servers.append(server)
        return server

    yield start
    running = [server for server in servers if server.process.poll() is None]
    for server in running:
        server.stop()


@pytest.fixture
def own_tmp(monkeypatch):
    """A folder of temporary files that no other program uses. Short: addresses of sockets are."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="own-"))
    monkeypatch.setenv("TMPDIR", str(folder))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def mount(coldrise, tmp_path):
    """Mounts the repository; every mount must end without an error."""
    mounts = []

    def start(*options, folder=None, **keywords):
        folder = tmp_path / f"mount{len(mounts)}" if folder is None else folder
        mounts.append(Mounted(coldrise, folder, *options, **keywords))
        return mounts[-1]

    yield start
    try:
        for mounted in mounts:
            if mounted.process.poll() is None:
                mounted.stop()
    finally:
        for mounted in mounts:
            mounted.clear()


@pytest.fixture
def clock(tmp_path):
    """A clock for processes that get its environment."""
    return BothClocks(tmp_path)


@pytest.fixture
def service(coldrise, tmp_path, request):
    """coldrised after its first scan of the repository: it reports no earlier events. It has the fixture `clock` if the test
    has."""
    clock = request.getfixturevalue("clock") if "clock" in request.fixturenames else None
    environment = clock and clock.environment()
    with Coldrised(tmp_path, coldrise.repository, coldrise.passphrase_file, environment) as service:
        wait_until(lambda: service.call("GET", "machines").status == 200, "the repository")
        service.clock = clock
        yield service


@pytest.fixture
def web():
    """A web server that takes messages."""
    with WebSink() as sink:
        yield sink


@pytest.fixture
def inbox(service, web):
    """The same, when the service knows it."""
    add(service, webhook(web.url))
    return web


@pytest.fixture
def jobs(service, tmp_path):
    return Jobs(service, tmp_path)


@pytest.fixture
def network():
    """A network of its own: two NFS servers in one network would conflict."""
    network = Network()
    yield network
    network.close()


@pytest.fixture
def serve_on(network, tmp_path):
    """Serves a repository over NFS; every server must end without an error."""
    servers = []

    def start(coldrise, *options):
        log = tmp_path / f"nfs{len(servers)}.log"
        servers.append(NfsServer(coldrise, network, log, *options))
        return servers[-1]

    yield start
    for server in servers:
        if server.process.poll() is None:
            server.stop()


@pytest.fixture
def nfs(coldrise, serve_on):
    """The same for the fresh repository."""
    return functools.partial(serve_on, coldrise)


@pytest.fixture
def site(tmp_path):
    """Starts sites that take copies, or give them; all are closed."""
    sites = []

    def make(*arguments):
        sites.append(FarSite(tmp_path, *arguments))
        sites[-1].start()
        return sites[-1]

    yield make
    for made in sites:
        made.close()


@pytest.fixture
def far(site, coldrise):
    """A site that is paired with the source."""
    made = site()
    made.pair(coldrise)
    return made


@pytest.fixture(params=["plain", "tls"])
def tls(request, tmp_path):
    """Options of an NBD server, and the client's TLS context."""
    if request.param == "plain":
        return [], None
    folder = make_certificates(tmp_path / "certificates")
    return ["--tls-certificates", folder], client_context(folder)


@pytest.fixture(scope="session")
def chromium():
    missing = browser.missing()
    if missing:
        pytest.fail(f"build and install first: {missing}", pytrace=False)
    with browser.chromium() as started:
        yield started


@pytest.fixture
def visit(chromium):
    """Opens windows; none of them may complain."""
    visitors = []

    def open_window(service, **options):
        visitors.append(browser.Visitor(chromium, service, **options))
        return visitors[-1]

    yield open_window
    complaints = [complaint for visitor in visitors for complaint in visitor.complaints]
    for visitor in visitors:
        visitor.close()
    assert not complaints, "\n".join(complaints)
