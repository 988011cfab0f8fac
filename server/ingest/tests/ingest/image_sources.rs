//! Images in foreign formats as sources.

use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use coldrise_block::ErrorKind;
use coldrise_ingest::source::SourceOptions;

use crate::common::{
    self, assert_same, folder, open, open_error, open_with, read_all, run, sparse_disk, text,
};

const SIZE: usize = 24 * common::MIB;

/// Converts a disk to an image of its own; the image's path.
fn image(folder: &Path, disk: &[u8], name: &str, driver: &str, options: &str) -> PathBuf {
    let raw = folder.join("origin.raw");
    common::write_sparse(&raw, disk);
    let path = folder.join(name);
    let mut arguments = vec!["convert", "-f", "raw", "-O", driver];
    if !options.is_empty() {
        arguments.extend(["-o", options]);
    }
    arguments.extend([text(&raw), text(&path)]);
    run("qemu-img", &arguments);
    path
}

#[test]
fn every_format_brings_the_disk_back() {
    let disk = sparse_disk(11, SIZE);
    for (name, driver, options) in [
        ("a.qcow2", "qcow2", ""),
        ("a2.qcow2", "qcow2", "compat=0.10"),
        ("a3.qcow2", "qcow2", "cluster_size=4k,extended_l2=off"),
        ("a.vmdk", "vmdk", "subformat=monolithicSparse"),
        ("a2.vmdk", "vmdk", "subformat=streamOptimized"),
        ("a3.vmdk", "vmdk", "subformat=monolithicFlat"),
        ("a4.vmdk", "vmdk", "subformat=twoGbMaxExtentSparse"),
        ("a5.vmdk", "vmdk", "subformat=twoGbMaxExtentFlat"),
        ("a.vhd", "vpc", "subformat=dynamic,force_size=on"),
        ("a2.vhd", "vpc", "subformat=fixed,force_size=on"),
        ("a.vhdx", "vhdx", "subformat=dynamic"),
        ("a2.vhdx", "vhdx", "subformat=fixed"),
    ] {
        let folder = folder();
        let path = image(folder.path(), &disk, name, driver, options);
        let source = open(&format!("vda={}", text(&path)))
            .unwrap_or_else(|error| panic!("{name} {options}: {error:?}"));
        let (content, read) = read_all(source.as_ref());
        assert_same(&content, &disk);
        // The VHDX has three blocks of 8 MiB here, and none of them is empty.
        if !options.contains("fixed") && !options.contains("Flat") && driver != "vhdx" {
            assert!(read < SIZE as u64 / 2, "{name} {options}: {read} bytes were read");
        }
        assert_eq!(source.check_after_reading().unwrap(), None);
    }
}

#[test]
fn paths_may_contain_qemu_option_syntax() {
    let disk = sparse_disk(12, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "a.qcow2", "qcow2", "");
    let odd = folder.path().join("b,file.driver=nbd \"quoted\" {x}:1.qcow2");
    std::fs::rename(&path, &odd).unwrap();
    let source = open(&format!("vda={}", text(&odd))).unwrap();
    assert_same(&read_all(source.as_ref()).0, &disk);
}

#[test]
fn the_format_is_never_guessed_from_content() {
    let disk = sparse_disk(13, SIZE);
    let folder = folder();
    let qcow2 = image(folder.path(), &disk, "a.qcow2", "qcow2", "");
    // A wrong prefix or extension is an error in QEMU's words, not a guess.
    for format in ["vmdk", "vhd", "vhdx"] {
        let error = open_error(&format!("vda={format}:{}", text(&qcow2)));
        assert!(
            matches!(error.kind(), ErrorKind::ToolFailed | ErrorKind::Io | ErrorKind::Unsupported),
            "{format}: {error:?}"
        );
        assert!(error.full_message().contains(text(&qcow2)), "{error}");
        assert!(!error.full_message().contains("json:"), "{}", error.full_message());
    }
    let lying = folder.path().join("lying.qcow2");
    common::write_sparse(&lying, &disk);
    let error = open_error(&format!("vda={}", text(&lying)));
    assert!(error.full_message().contains("not in qcow2 format"), "{}", error.full_message());
    // A guest's disk that looks like an image stays a raw disk.
    let source = open(&format!("vda=raw:{}", text(&qcow2))).unwrap();
    assert_same(&read_all(source.as_ref()).0, &std::fs::read(&qcow2).unwrap());
}

#[test]
fn a_truncated_image_is_an_error() {
    let disk = sparse_disk(14, SIZE);
    for (name, driver, options) in [
        ("a.qcow2", "qcow2", ""),
        ("a.vmdk", "vmdk", "subformat=monolithicSparse"),
        ("a2.vmdk", "vmdk", "subformat=streamOptimized"),
        ("a.vhd", "vpc", "subformat=dynamic,force_size=on"),
        ("a2.vhd", "vpc", "subformat=fixed,force_size=on"),
        ("a.vhdx", "vhdx", "subformat=dynamic"),
    ] {
        let folder = folder();
        let path = image(folder.path(), &disk, name, driver, options);
        let length = std::fs::metadata(&path).unwrap().len();
        let file = std::fs::File::options().write(true).open(&path).unwrap();
        for keep in [length - length / 4, 200] {
            file.set_len(keep).unwrap();
            let spec = format!("vda={}", text(&path));
            match open(&spec) {
                Ok(_) => panic!("{name} {options} with {keep} of {length} bytes was opened"),
                Err(error) => assert!(error.full_message().contains(text(&path)), "{error:?}"),
            }
        }
    }
}

#[test]
fn a_missing_flat_extent_is_an_error() {
    let disk = sparse_disk(15, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "a.vmdk", "vmdk", "subformat=monolithicFlat");
    let flat = folder.path().join("a-flat.vmdk");
    let file = std::fs::File::options().write(true).open(&flat).unwrap();
    file.set_len(SIZE as u64 / 2).unwrap();
    let error = open_error(&format!("vda={}", text(&path)));
    assert_eq!(error.kind(), ErrorKind::Io);
    assert!(error.full_message().contains("a-flat.vmdk is truncated"), "{error:?}");
    std::fs::remove_file(&flat).unwrap();
    let error = open_error(&format!("vda={}", text(&path)));
    assert!(error.full_message().contains("a-flat.vmdk"), "{error:?}");
}

#[test]
fn a_backing_file_is_refused_unless_it_is_followed() {
    let disk = sparse_disk(16, SIZE);
    let folder = folder();
    let base = image(folder.path(), &disk, "base.qcow2", "qcow2", "");
    let middle = folder.path().join("middle.qcow2");
    let top = folder.path().join("top.qcow2");
    // A relative name is meant relative to the image.
    let overlay = |from: &str, to: &Path| {
        run("qemu-img", &["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", from, text(to)]);
    };
    overlay("base.qcow2", &middle);
    overlay("middle.qcow2", &top);
    run("qemu-io", &["-f", "qcow2", "-c", "write -P 9 1M 64k", text(&top)]);

    let error = open_error(&format!("vda={}", text(&top)));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.full_message().contains("--follow-backing"), "{error}");

    let follow = SourceOptions { follow_backing: true, ..SourceOptions::default() };
    let source = open_with(&format!("vda={}", text(&top)), &follow).unwrap();
    let mut expected = disk.clone();
    expected[common::MIB..common::MIB + 65536].fill(9);
    assert_same(&read_all(source.as_ref()).0, &expected);
    drop(source);

    // Followed or not, the format of a backing file without a stated format is not guessed.
    let header = std::fs::File::options().write(true).open(&top).unwrap();
    let bytes = std::fs::read(&top).unwrap();
    let word = bytes.windows(5).position(|window| window == b"qcow2").unwrap();
    header.write_all_at(&[0; 5], word as u64).unwrap();
    // The header extension 0xE2792ACA holds the word; without it there is none.
    let marker = bytes.windows(4).position(|w| w == [0xE2, 0x79, 0x2A, 0xCA]).unwrap();
    header.write_all_at(&[0; 8], marker as u64).unwrap();
    let error = open_with(&format!("vda={}", text(&top)), &follow).err().unwrap();
    assert!(error.full_message().contains("never guessed"), "{}", error.full_message());
    let _ = base;
}

#[test]
fn a_circular_backing_chain_is_refused() {
    let folder = folder();
    let (a, b) = (folder.path().join("a.qcow2"), folder.path().join("b.qcow2"));
    run("qemu-img", &["create", "-q", "-f", "qcow2", text(&a), "1M"]);
    for (from, to) in [(&a, &b), (&b, &a)] {
        let backing = ["-F", "qcow2", "-b", text(from)];
        let mut arguments = vec!["create", "-q", "-u", "-f", "qcow2"];
        arguments.extend(backing);
        arguments.extend([text(to), "1M"]);
        run("qemu-img", &arguments);
    }
    let follow = SourceOptions { follow_backing: true, ..SourceOptions::default() };
    let error = open_with(&format!("vda={}", text(&a)), &follow).err().unwrap();
    assert!(error.full_message().contains("circle"), "{}", error.full_message());
}

#[test]
fn a_vmdk_parent_is_a_backing_file() {
    let disk = sparse_disk(17, SIZE);
    let folder = folder();
    let base = image(folder.path(), &disk, "base.vmdk", "vmdk", "");
    let top = folder.path().join("top.vmdk");
    let backing = ["-F", "vmdk", "-b", text(&base), text(&top)];
    let mut arguments = vec!["create", "-q", "-f", "vmdk"];
    arguments.extend(backing);
    run("qemu-img", &arguments);
    let error = open_error(&format!("vda={}", text(&top)));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    let follow = SourceOptions { follow_backing: true, ..SourceOptions::default() };
    let source = open_with(&format!("vda={}", text(&top)), &follow).unwrap();
    assert_same(&read_all(source.as_ref()).0, &disk);
}

#[test]
fn an_image_cannot_lead_to_a_file_that_was_not_named() {
    let secret_folder = folder();
    let secret = secret_folder.path().join("secret");
    std::fs::write(&secret, vec![b'S'; common::MIB]).unwrap();
    let folder = folder();

    // A qcow2 whose content lies in another file.
    let data = folder.path().join("data.raw");
    let image = folder.path().join("a.qcow2");
    let options = format!("data_file={},data_file_raw=on", text(&data));
    run("qemu-img", &["create", "-q", "-f", "qcow2", "-o", &options, text(&image), "1M"]);
    let error = open_error(&format!("vda={}", text(&image)));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.full_message().contains("data file"), "{error}");

    // A VMDK whose extent lies elsewhere, by every way of naming it.
    let descriptor = |extent: &str| {
        let content = format!(
            "# Disk DescriptorFile\nversion=1\nCID=12345678\nparentCID=ffffffff\n\
             createType=\"monolithicFlat\"\n\nRW 2048 FLAT \"{extent}\" 0\n\n\
             ddb.adapterType = \"ide\"\n"
        );
        let path = folder.path().join("b.vmdk");
        std::fs::write(&path, content).unwrap();
        open_error(&format!("vda={}", text(&path)))
    };
    std::os::unix::fs::symlink(&secret, folder.path().join("link.vmdk")).unwrap();
    let up = format!("../{}/secret", secret_folder.path().file_name().unwrap().to_str().unwrap());
    for extent in [
        text(&secret),
        up.as_str(),
        "link.vmdk",
        "nbd:unix:/run/x",
        "json:{}",
        // sscanf takes a line break for a blank.
        "x\"\nRW\n2048\nFLAT\n\"/etc/hostname",
    ] {
        let error = descriptor(extent);
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{extent}: {error:?}");
        assert!(error.full_message().contains("folder of the image"), "{extent}: {error:?}");
    }

    // A sparse extent that is a second description.
    let sparse = folder.path().join("sparse.vmdk");
    let mut header = vec![0; 512];
    header[..4].copy_from_slice(b"KDMV");
    header[4] = 1;
    std::fs::write(&sparse, &header).unwrap();
    for error in [descriptor("sparse.vmdk"), open_error(&format!("vda={}", text(&sparse)))] {
        assert!(error.full_message().contains("second description"), "{error:?}");
    }
}

#[test]
fn a_differencing_vhd_is_refused() {
    let disk = sparse_disk(18, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "a.vhd", "vpc", "subformat=dynamic,force_size=on");
    let mut bytes = std::fs::read(&path).unwrap();
    let footer = bytes.len() - 512;
    // Type 4, with the checksums that make QEMU read it as if it were whole.
    for start in [0, footer] {
        bytes[start + 63] = 4;
        bytes[start + 64..start + 68].fill(0);
        let sum: u32 = bytes[start..start + 512].iter().map(|&byte| u32::from(byte)).sum();
        bytes[start + 64..start + 68].copy_from_slice(&(!sum).to_be_bytes());
    }
    std::fs::write(&path, &bytes).unwrap();
    let error = open_error(&format!("vda={}", text(&path)));
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.full_message().contains("differencing"), "{error}");
}

#[test]
fn an_image_in_use_is_refused_with_advice() {
    let disk = sparse_disk(19, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "a.qcow2", "qcow2", "");
    // Another process has it open for writing, as a running VM does.
    let _writer = common::Server::qemu_nbd(folder.path(), &["--format=qcow2", text(&path)]);
    let error = open_error(&format!("vda={}", text(&path)));
    assert!(error.full_message().contains("lock"), "{}", error.full_message());
    assert!(error.full_message().contains("running VM"), "{}", error.full_message());
}

/// Processes whose command line names `path`, besides this test itself.
fn processes_with(path: &Path) -> Vec<String> {
    let own = std::process::id().to_string();
    let mut found = Vec::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let name = entry.file_name().into_string().unwrap_or_default();
        let is_process = name.bytes().all(|byte| byte.is_ascii_digit()) && name != own;
        // A process may end during the look-up.
        let line = std::fs::read(entry.path().join("cmdline")).unwrap_or_default();
        if is_process && String::from_utf8_lossy(&line).contains(text(path)) {
            found.push(name);
        }
    }
    found
}

/// Waits until no process names `path`; panics if one stays.
fn wait_until_none_is_left(path: &Path) {
    let started = std::time::Instant::now();
    while !processes_with(path).is_empty() {
        let waited = started.elapsed();
        assert!(waited.as_secs() < 20, "left over: {:?}", processes_with(path));
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
}

#[test]
fn the_child_ends_with_its_source() {
    let disk = sparse_disk(20, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "a.qcow2", "qcow2", "");
    let source = open(&format!("vda={}", text(&path))).unwrap();
    assert_eq!(processes_with(&path).len(), 1);
    drop(source);
    assert!(processes_with(&path).is_empty(), "the child is reaped when the source is dropped");
}

/// Runs itself again in a separate process, which opens a source and dies.
#[test]
fn the_child_ends_with_a_killed_process() {
    const WANTED: &str = "COLDRISE_TEST_IMAGE_TO_DIE_WITH";
    if let Ok(path) = std::env::var(WANTED) {
        let source = open(&format!("vda={path}")).unwrap();
        assert_eq!(processes_with(Path::new(&path)).len(), 1);
        let own = rustix::process::getpid();
        rustix::process::kill_process(own, rustix::process::Signal::KILL).unwrap();
        drop(source);
        return;
    }
    let disk = sparse_disk(20, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "b.qcow2", "qcow2", "");
    let status = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "image_sources::the_child_ends_with_a_killed_process"])
        .env(WANTED, &path)
        .env("TMPDIR", folder.path())
        .stdout(std::process::Stdio::null())
        .status()
        .unwrap();
    assert_eq!(std::os::unix::process::ExitStatusExt::signal(&status), Some(9));
    wait_until_none_is_left(&path);
}

#[test]
fn opening_an_image_can_be_cancelled() {
    let disk = sparse_disk(20, SIZE);
    let folder = folder();
    let path = image(folder.path(), &disk, "c.qcow2", "qcow2", "");
    let cancelled = std::sync::atomic::AtomicBool::new(true);
    let spec = coldrise_ingest::SourceSpec::parse(&format!("vda={}", text(&path))).unwrap();
    let opened = coldrise_ingest::source::open_source(&spec, &SourceOptions::default(), &cancelled);
    assert_eq!(opened.err().unwrap().kind(), ErrorKind::Interrupted);
    assert!(processes_with(&path).is_empty());
}
