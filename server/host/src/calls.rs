//! The system calls that a child may not use.
//!
//! QEMU's tools read files that are open to them and answer on an inherited socket. They
//! need not create or connect sockets, change files, inspect or signal other processes,
//! or use the kernel's larger subsystems.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter,
    SeccompRule, sock_filter,
};

/// The newest call that the list below covers (mseal, Linux 6.10). Later calls, and
/// those of x86-64's second numbering, fail as on a kernel without them.
const LAST_KNOWN_CALL: u32 = 462;
/// The same number on all architectures.
const CLONE3: u32 = 435;

/// Refused with EPERM.
const REFUSED: &[i64] = &[
    // Network. socketpair stays allowed for starting processes; it connects nowhere
    // else.
    libc::SYS_socket,
    libc::SYS_connect,
    libc::SYS_bind,
    libc::SYS_listen,
    // Other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_process_mrelease,
    libc::SYS_kcmp,
    libc::SYS_pidfd_open,
    libc::SYS_pidfd_getfd,
    libc::SYS_pidfd_send_signal,
    libc::SYS_kill,
    libc::SYS_tkill,
    libc::SYS_tgkill,
    libc::SYS_rt_sigqueueinfo,
    libc::SYS_rt_tgsigqueueinfo,
    libc::SYS_msgget,
    libc::SYS_semget,
    libc::SYS_shmget,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
    // Changes to the file system; Landlock does not cover most of them.
    libc::SYS_truncate,
    libc::SYS_ftruncate,
    libc::SYS_fallocate,
    libc::SYS_renameat2,
    libc::SYS_linkat,
    libc::SYS_symlinkat,
    libc::SYS_unlinkat,
    libc::SYS_mkdirat,
    libc::SYS_mknodat,
    libc::SYS_fchmod,
    libc::SYS_fchmodat,
    452, // fchmodat2
    libc::SYS_fchown,
    libc::SYS_fchownat,
    libc::SYS_utimensat,
    libc::SYS_setxattr,
    libc::SYS_lsetxattr,
    libc::SYS_fsetxattr,
    libc::SYS_removexattr,
    libc::SYS_lremovexattr,
    libc::SYS_fremovexattr,
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    libc::SYS_fanotify_mark,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    // Mounts and namespaces.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_open_tree,
    libc::SYS_move_mount,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_unshare,
    libc::SYS_setns,
    // Kernel subsystems with a large attack surface, and administration of the kernel.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_io_uring_setup,
    libc::SYS_io_uring_enter,
    libc::SYS_io_uring_register,
    libc::SYS_memfd_secret,
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_reboot,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    libc::SYS_acct,
    libc::SYS_syslog,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_clock_adjtime,
    libc::SYS_adjtimex,
    libc::SYS_sethostname,
    libc::SYS_setdomainname,
    libc::SYS_vhangup,
    libc::SYS_personality,
];

/// Older forms of these calls, which newer architectures never had.
#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[i64] = &[
    libc::SYS_creat,
    libc::SYS_rename,
    libc::SYS_renameat,
    libc::SYS_link,
    libc::SYS_symlink,
    libc::SYS_unlink,
    libc::SYS_mkdir,
    libc::SYS_rmdir,
    libc::SYS_mknod,
    libc::SYS_chmod,
    libc::SYS_chown,
    libc::SYS_lchown,
    libc::SYS_utime,
    libc::SYS_utimes,
    libc::SYS_futimesat,
    libc::SYS_iopl,
    libc::SYS_ioperm,
    libc::SYS_modify_ldt,
    libc::SYS_uselib,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[i64] = &[38]; // renameat

/// A child may create processes, but no namespaces for them.
const NAMESPACE_FLAGS: [i32; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Needed to change an image that is open for writing.
const WRITING: [i64; 2] = [libc::SYS_ftruncate, libc::SYS_fallocate];

/// The filter for this architecture, or an error text if there is none. A child that `writes` an image may also
/// change its length and punch holes.
pub(crate) fn filter(writes: bool) -> Result<BpfProgram, String> {
    let program = known_calls(writes).map_err(|error| error.to_string())?;
    Ok(unknown_calls().into_iter().chain(program).collect())
}

fn known_calls(writes: bool) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let is_refused = |call: &&i64| !(writes && WRITING.contains(*call));
    for &call in REFUSED.iter().chain(REFUSED_HERE).filter(is_refused) {
        rules.insert(call, Vec::new());
    }
    let mut namespaces = Vec::new();
    for flag in NAMESPACE_FLAGS {
        let flag = u64::from(flag.unsigned_abs());
        let is_set = SeccompCmpOp::MaskedEq(flag);
        let condition = SeccompCondition::new(0, SeccompCmpArgLen::Qword, is_set, flag)?;
        namespaces.push(SeccompRule::new(vec![condition])?);
    }
    rules.insert(libc::SYS_clone, namespaces);
    let filter = SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        std::env::consts::ARCH.try_into()?,
    )?;
    filter.try_into()
}

/// Answers ENOSYS to clone3 and to calls newer than this list. A filter cannot see the
/// flags of clone3; the C library then falls back to clone, whose flags it can see.
fn unknown_calls() -> [sock_filter; 4] {
    let instruction = |code: u32, jt, jf, k| sock_filter { code: code as u16, jt, jf, k };
    [
        instruction(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0),
        instruction(libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K, 1, 0, CLONE3),
        instruction(libc::BPF_JMP | libc::BPF_JGT | libc::BPF_K, 0, 1, LAST_KNOWN_CALL),
        instruction(
            libc::BPF_RET | libc::BPF_K,
            0,
            0,
            libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32,
        ),
    ]
}
