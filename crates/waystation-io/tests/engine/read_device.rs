//! Reads to devices, see `device_support`.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::device_support::{Case, DEVICE, Fault, HostDevice, modes};
use crate::read_support::{BLOCK, Memory};
use waystation_io::Kind;
use waystation_io::mode::Mode;
use waystation_io::read::device::{Devices, Region};

/// Whatever takes longer never ends.
const HANG: Duration = Duration::from_secs(120);
use waystation_io::ring::Ring;

#[test]
fn everything_arrives_though_copies_are_late() {
    for mode in modes() {
        for verified in [true, false] {
            let case = Case { verified, ..Case::new(40 * BLOCK + 12_345) };
            // At an odd place in the file, and at another on the device.
            let (begin, nbytes) = (777, case.content.len() - 1000);
            let statistics = case.run(&[0, begin as i64, nbytes as i64, 0, case.at(256)], mode).unwrap();
            assert_eq!(statistics.bytes_needed, nbytes as u64);
            assert!(case.on_device()[256..][..nbytes] == case.content[begin..][..nbytes], "{mode:?}");
            assert!(case.on_device()[..256].iter().all(|&byte| byte == case.on_device()[0]));
            assert!(case.log.most_in_flight.load(Ordering::SeqCst) > 1, "copies took turns with reads");
        }
    }
}

#[test]
fn small_pieces_boxes_and_what_stays_on_the_host_are_read_together() {
    for mode in modes() {
        let case = Case::new(6 * BLOCK);
        let host = Memory::new(BLOCK);
        let mut words = vec![0, 3, BLOCK as i64 - 5, 0, host.address() as i64];
        // 500 pieces of 100 bytes, in reverse order and 256 bytes apart, between which nothing changes.
        for index in 0..500usize {
            words.extend([0, index as i64 * 100, 100, 0, case.at((499 - index) * 256)]);
        }
        // A box of 50 by 1000 bytes, whose rows are 4096 bytes apart in the file and 1024 on the device, and
        // one whose rows go backwards there.
        let (first, second) = (1 << 20, 1 << 21);
        let shape = [60, 4096, 5, 96, 50, 1000];
        words.extend([0, BLOCK as i64, 1, 2].into_iter().chain(shape).chain([case.at(first), 1024, 1]));
        words.extend([0, BLOCK as i64, 1, 2].into_iter().chain(shape).chain([case.at(second), -1024, 1]));
        let statistics = case.run(&words, mode).unwrap();
        assert_eq!(statistics.bytes_needed as usize, BLOCK - 5 + 50_000 + 2 * 50_000);
        assert!(host.bytes()[..BLOCK - 5] == case.content[3..][..BLOCK - 5]);
        let untouched = case.on_device()[case.content.len() * 2 - 1];
        for index in 0..500 {
            let place = &case.on_device()[(499 - index) * 256..][..256];
            assert_eq!(place[..100], case.content[index * 100..][..100]);
            assert!(place[100..].iter().all(|&byte| byte == untouched));
        }
        for row in 0..50 {
            let stored = &case.content[BLOCK + (5 + row) * 4096 + 96..][..1000];
            assert_eq!(&case.on_device()[first + row * 1024..][..1000], stored);
            assert_eq!(&case.on_device()[second - row * 1024..][..1000], stored);
        }
    }
}

#[test]
fn bytes_that_are_damaged_never_reach_the_device() {
    for mode in modes() {
        let case = Case::new(8 * BLOCK);
        let mut damaged = case.content.clone();
        damaged[5 * BLOCK + 9] ^= 1;
        fs::write(&case.path, damaged).unwrap();
        let untouched = case.on_device()[5 * BLOCK];
        let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap_err();
        assert_eq!(error.kind(), Kind::Corrupt);
        assert!(case.on_device()[5 * BLOCK..6 * BLOCK].iter().all(|&byte| byte == untouched));
    }
}

#[test]
fn a_copy_that_fails_fails_the_job_once_all_have_been_waited_for() {
    for mode in modes() {
        for (number, fault) in
            [(0, Fault::AtStart), (7, Fault::AtStart), (0, Fault::OnTheWay), (9, Fault::OnTheWay)]
        {
            let case = Case::new(24 * BLOCK);
            *case.log.fault.lock().unwrap() = Some((number, fault));
            let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap_err();
            assert_eq!(error.kind(), Kind::Unavailable);
            assert!(error.message().contains("on purpose"), "{error}");
        }
    }
}

#[test]
fn the_last_copy_counts_too() {
    let case = Case::new(4 * BLOCK);
    *case.log.fault.lock().unwrap() = Some((3, Fault::OnTheWay));
    let error = case.run(&[0, 0, case.content.len() as i64, 0, case.at(0)], None).unwrap_err();
    assert!(error.message().contains("lost"), "{error}");
}

#[test]
fn a_cancelled_job_leaves_no_copy_under_way() {
    for mode in modes() {
        let case = Case { late_by: Duration::from_millis(20), ..Case::new(64 * BLOCK) };
        let job = case.start(&[0, 0, case.content.len() as i64, 0, case.at(0)], mode).unwrap();
        while case.log.started.load(Ordering::SeqCst) < 3 {
            std::thread::yield_now();
        }
        job.shared().cancel();
        assert_eq!(case.finish(job).unwrap_err().kind(), Kind::Cancelled);
        assert!(case.log.started.load(Ordering::SeqCst) < 64, "it went on to the end");
    }
}

#[test]
fn progress_counts_what_has_reached_the_device() {
    let case = Case { late_by: Duration::from_millis(50), ..Case::new(BLOCK) };
    let job = case.start(&[0, 0, BLOCK as i64, 0, case.at(0)], None).unwrap();
    while case.log.started.load(Ordering::SeqCst) == 0 {
        std::thread::yield_now();
    }
    if case.log.in_flight.load(Ordering::SeqCst) == 1 && !job.shared().is_finished() {
        let (done, _) = job.shared().progress();
        assert!(done == 0 || case.on_device()[..BLOCK] == case.content[..]);
    }
    case.finish(job).unwrap();
}

#[test]
fn a_destination_at_the_edge_of_device_memory_is_refused() {
    let case = Case::new(BLOCK);
    for (address, nbytes) in [(case.at(0) - 100, 200), (case.at(2 * BLOCK) - 100, 200)] {
        let error = case.start(&[0, 0, nbytes, 0, address], None).err().unwrap();
        assert_eq!(error.kind(), Kind::InvalidInput);
    }
}

#[test]
fn regions_do_not_overlap() {
    let copier = || Arc::new(HostDevice { log: Arc::default(), late_by: Duration::ZERO });
    let region = |address, nbytes| Region { device: DEVICE, address, nbytes };
    assert!(Devices::new(copier(), vec![region(4096, 100), region(8192, 1), region(4196, 1)]).is_ok());
    for regions in [vec![region(4096, 101), region(4196, 1)], vec![region(usize::MAX, 2)]] {
        assert_eq!(Devices::new(copier(), regions).unwrap_err().kind(), Kind::InvalidInput);
    }
}

#[test]
fn what_is_in_place_is_announced_though_later_copies_are_held() {
    for mode in modes() {
        let case = Case { announce: true, ..Case::new(40 * BLOCK) };
        *case.log.held_from.lock().unwrap() = Some(case.at(4 * BLOCK) as u64);
        // A record of nothing, then one for each block.
        let words: Vec<i64> = [0, 0, 0, 0, case.at(0)]
            .into_iter()
            .chain(
                (0..40)
                    .flat_map(|index| [0, (index * BLOCK) as i64, BLOCK as i64, 0, case.at(index * BLOCK)]),
            )
            .collect();
        let job = case.start(&words, mode).unwrap();
        let is_there = job.shared().wait_front(5, Some(HANG));
        if !is_there {
            case.log.release(); // or this test would wait for ever
        }
        assert_eq!((is_there, job.shared().front()), (true, 5), "{mode:?}");
        assert!(!job.shared().is_finished());
        assert!(case.on_device()[..4 * BLOCK] == case.content[..4 * BLOCK]);
        case.log.release();
        for records in 6..=41 {
            assert!(job.shared().wait_front(records, None));
            let end = (records as usize - 1) * BLOCK;
            assert!(case.on_device()[..end] == case.content[..end], "{mode:?}");
        }
        case.finish(job).unwrap();
    }
}

/// Copies end in another order than they were started, as those to several devices do; reads as well.
#[test]
fn what_is_in_place_is_announced_though_earlier_copies_are_held() {
    if Ring::new(1).is_err() {
        return;
    }
    let case = Case { announce: true, ..Case::new(40 * BLOCK) };
    *case.log.held_from.lock().unwrap() = Some(case.at(38 * BLOCK) as u64);
    // A record for each block, the last block first.
    let record = |number| [0, ((39 - number) * BLOCK) as i64, BLOCK as i64, 0, case.at(number * BLOCK)];
    let words: Vec<i64> = (0..40).flat_map(record).collect();
    let job = case.start(&words, Some(Mode::DirectRing)).unwrap();
    let is_there = job.shared().wait_front(38, Some(HANG));
    if !is_there {
        case.log.release(); // or this test would wait for ever
    }
    assert_eq!((is_there, job.shared().front()), (true, 38));
    case.log.release();
    assert!(job.shared().wait_front(40, None));
    case.finish(job).unwrap();
    let blocks = case.on_device()[..40 * BLOCK].chunks(BLOCK);
    assert!(blocks.eq(case.content.chunks(BLOCK).rev()));
}

#[test]
fn a_record_of_rows_is_in_place_once_all_its_rows_are() {
    for mode in modes() {
        let case = Case { announce: true, ..Case::new(8 * BLOCK) };
        // 8 rows, one at the beginning of each block; and a record behind it whose bytes come first.
        let (width, rows) = (1000, 8);
        let mut words = vec![0, 0, 1, 2, rows, BLOCK as i64, 0, 5, rows, width];
        words.extend([case.at(4096), width, 1, 0, 0, 5, 0, case.at(0)]);
        *case.log.held_from.lock().unwrap() = Some(case.at(4096 + 7 * width as usize) as u64);
        let job = case.start(&words, mode).unwrap();
        let counts = || (case.log.started.load(Ordering::SeqCst), case.log.in_flight.load(Ordering::SeqCst));
        while counts() != (8, 1) {
            std::thread::yield_now();
        }
        assert_eq!(job.shared().front(), 0, "{mode:?}");
        case.log.release();
        assert!(job.shared().wait_front(2, None));
        assert_eq!(job.shared().front(), 2);
        case.finish(job).unwrap();
    }
}

#[test]
fn a_failure_ends_the_wait_for_what_did_not_come() {
    let case = Case { announce: true, ..Case::new(8 * BLOCK) };
    *case.log.fault.lock().unwrap() = Some((0, Fault::OnTheWay));
    let job = case.start(&[0, 0, case.content.len() as i64, 0, case.at(0)], None).unwrap();
    assert!(job.shared().wait_front(1, None));
    assert_eq!(job.shared().front(), 0);
    assert_eq!(case.finish(job).unwrap_err().kind(), Kind::Unavailable);
}
