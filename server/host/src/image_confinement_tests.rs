//! Tries the confinement of a child with ordinary programs.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::{AllowedFile, confine_this_thread, import_confinement};

/// A folder with one named and one unnamed file.
struct Files {
    folder: tempfile::TempDir,
    named: PathBuf,
    other: PathBuf,
}

fn files() -> Files {
    let folder = tempfile::tempdir().unwrap();
    let (named, other) = (folder.path().join("named"), folder.path().join("other"));
    std::fs::write(&named, "named").unwrap();
    std::fs::write(&other, "secret").unwrap();
    Files { folder, named, other }
}

impl Files {
    /// Runs a shell command in the folder, confined to the named file. Returns whether it
    /// succeeded, and its output. `$1` is the first of `arguments`.
    fn run(&self, script: &str, arguments: &[&Path], stdin: Stdio) -> (bool, String) {
        let mut command = Command::new("sh");
        command.args(["-c", script, "sh"]).args(arguments).env("LC_ALL", "C");
        command.stdin(stdin).stdout(Stdio::piped()).stderr(Stdio::piped());
        command.current_dir(self.folder.path());
        let named =
            [AllowedFile { path: self.named.clone(), may_be_link: true, is_writable: false }];
        let output = std::thread::spawn(move || {
            let confinement = confine_this_thread(&named).unwrap();
            assert_eq!(confinement.missing(), None, "this test needs Landlock and seccomp");
            command.output().unwrap()
        });
        let output = output.join().unwrap();
        let said = [output.stdout, output.stderr].concat();
        (output.status.success(), String::from_utf8_lossy(&said).into_owned())
    }

    fn succeeds(&self, script: &str) -> String {
        let (success, said) = self.run(script, &[], Stdio::null());
        assert!(success, "{script}: {said}");
        said
    }

    /// Expects the command to fail for lack of permission, and the files to be unchanged.
    fn is_denied(&self, script: &str) {
        let (success, said) = self.run(script, &[&self.other], Stdio::null());
        let said = said.to_lowercase();
        let is_denied = ["permission denied", "not permitted"].iter().any(|why| said.contains(why));
        assert!(!success && is_denied, "{script}: {said}");
        assert_eq!(std::fs::read_to_string(&self.named).unwrap(), "named", "{script}");
        assert_eq!(std::fs::read_to_string(&self.other).unwrap(), "secret", "{script}");
        assert_eq!(std::fs::read_dir(self.folder.path()).unwrap().count(), 2, "{script}");
    }
}

#[test]
fn only_named_files_are_readable() {
    let files = files();
    assert_eq!(files.succeeds("cat named"), "named");
    // By any of its names.
    let link = tempfile::tempdir().unwrap().keep().join("link");
    std::os::unix::fs::symlink(&files.named, &link).unwrap();
    assert_eq!(files.succeeds(&format!("cat {}", link.display())), "named");
    std::fs::remove_file(&link).unwrap();
    std::os::unix::fs::symlink(&files.other, &link).unwrap();
    files.is_denied(&format!("cat {}", link.display()));
    std::fs::remove_dir_all(link.parent().unwrap()).unwrap();
    for script in [
        "cat other",
        "cat \"$1\"",
        "ls .",
        "cat /etc/passwd",
        "ls /root",
        "ls /home",
        "ls /tmp",
        "cat /proc/self/environ",
        "cat /proc/$PPID/environ",
        "cat /dev/zero",
    ] {
        files.is_denied(script);
    }
}

#[test]
fn no_file_can_be_changed() {
    let files = files();
    for script in [
        "echo x >named",
        "echo x >>named",
        "echo x >new",
        "mkdir new",
        "rm named",
        "rm -f other",
        "mv named new",
        "ln named new",
        "ln -s named new",
        "mkfifo new",
        "chmod 777 named",
        "touch named",
        "truncate -s 0 named",
        "chown 1 named",
        "mount -t tmpfs none .",
    ] {
        files.is_denied(script);
    }
}

#[test]
fn no_socket_can_be_created_or_connected() {
    let files = files();
    for family in ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK"] {
        let script = format!("/usr/bin/python3 -c 'import socket; socket.socket(socket.{family})'");
        files.is_denied(&script);
    }
    // Not even with an inherited socket.
    let place = tempfile::tempdir().unwrap();
    let path = place.path().join("listening");
    let _listener = std::os::unix::net::UnixListener::bind(&path).unwrap();
    let socket = rustix::net::socket(
        rustix::net::AddressFamily::UNIX,
        rustix::net::SocketType::STREAM,
        None,
    )
    .unwrap();
    let script =
        "/usr/bin/python3 -c 'import socket, sys; socket.socket(fileno=0).connect(sys.argv[1])' $1";
    let (success, said) = files.run(script, &[&path], Stdio::from(socket));
    assert!(!success && said.contains("Operation not permitted"), "{said}");
}

#[test]
fn other_processes_are_out_of_reach() {
    let files = files();
    files.is_denied(&format!("kill -0 {}", std::process::id()));
    files.is_denied("unshare --user true");
    files.is_denied("unshare --net true");
    // The child has no such capability, even if root runs this test.
    files.is_denied("/usr/bin/python3 -c 'import os; os.nice(-1)'");
}

#[test]
fn calls_under_other_numbers_do_not_exist() {
    let files = files();
    for (number, what) in [
        ("0x40000000 + 41", "socket of the second numbering"),
        ("1000", "a call in the future"),
        ("435", "clone3"),
    ] {
        let said = files.succeeds(&format!(
            "/usr/bin/python3 -c 'import ctypes; libc = ctypes.CDLL(None, use_errno=True); \
             print(libc.syscall({number}, 1, 1, 0), ctypes.get_errno())'"
        ));
        assert_eq!(said.trim(), format!("-1 {}", libc::ENOSYS), "{what}");
    }
}

#[test]
fn the_caller_stays_unconfined() {
    assert_eq!(import_confinement().unwrap().missing(), None);
    let files = files();
    std::fs::write(files.folder.path().join("new"), "free").unwrap();
    std::net::TcpListener::bind("127.0.0.1:0").unwrap();
}

#[test]
fn a_missing_file_is_an_error() {
    let missing = files().folder.path().join("missing");
    let file = AllowedFile { path: missing, may_be_link: true, is_writable: false };
    let outcome = std::thread::spawn(move || confine_this_thread(&[file])).join().unwrap();
    assert!(outcome.unwrap_err().full_message().contains("missing"));
}

/// A name from an image that becomes a link after it was checked.
#[test]
fn a_link_is_followed_only_where_the_user_gave_it() {
    let files = files();
    let link = files.folder.path().join("link");
    std::os::unix::fs::symlink(&files.other, &link).unwrap();
    let reads = |may_be_link| {
        let file = AllowedFile { path: link.clone(), may_be_link, is_writable: false };
        let read = std::thread::spawn(move || {
            confine_this_thread(std::slice::from_ref(&file)).unwrap();
            std::fs::read_to_string(&file.path)
        });
        read.join().unwrap()
    };
    assert_eq!(reads(true).unwrap(), "secret");
    assert_eq!(reads(false).unwrap_err().kind(), std::io::ErrorKind::PermissionDenied);
}
