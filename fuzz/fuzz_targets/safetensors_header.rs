//! Whatever our reader accepts, the reference implementation accepts and understands alike, and our
//! writer writes again.
//!
//! The input is the JSON text; the length before it and the data after it are made to fit, or the
//! fuzzer would spend its time on guessing eight bytes.

#![no_main]

use libfuzzer_sys::fuzz_target;
use safetensors::SafeTensors;
use waystation_format::safetensors::{Header, Planned, build, parse};

const DATA_LIMIT_BYTES: u64 = 1 << 16;

fuzz_target!(|json: &[u8]| {
    let mut file = [&(json.len() as u64).to_le_bytes(), json].concat();
    // Which length is right only the header knows: the greatest number in it.
    let data_bytes = greatest_number(json).min(DATA_LIMIT_BYTES) as usize;
    file.resize(file.len() + data_bytes, 0);
    let Ok(header) = parse(&file, file.len() as u64) else { return };
    check_reference(&header, &file);
    check_writer(&header);
});

fn greatest_number(json: &[u8]) -> u64 {
    let numbers = json.split(|byte| !byte.is_ascii_digit());
    numbers.filter_map(|digits| std::str::from_utf8(digits).ok()?.parse().ok()).max().unwrap_or(0)
}

fn check_reference(header: &Header, file: &[u8]) {
    let reference = SafeTensors::deserialize(file).expect("the reference refuses what we accept");
    assert_eq!(reference.len(), header.tensors.len());
    for tensor in &header.tensors {
        let view = reference.tensor(&tensor.name).expect("the reference does not know a name");
        assert_eq!(view.dtype().to_string(), tensor.dtype.name());
        assert!(view.shape().iter().map(|&extent| extent as u64).eq(tensor.shape.iter().copied()));
        let data = &file[tensor.begin as usize..tensor.end as usize];
        assert_eq!((view.data().as_ptr(), view.data().len()), (data.as_ptr(), data.len()));
    }
}

fn check_writer(header: &Header) {
    let plan: Vec<Planned<'_>> = header
        .tensors
        .iter()
        .map(|one| Planned { name: (&*one.name).into(), dtype: one.dtype, shape: (&*one.shape).into() })
        .collect();
    let built = build(&plan, header.metadata.as_deref(), 4096).expect("the writer refuses what was read");
    let data_bytes = header.tensors.last().map_or(0, |last| last.end - header.data_start);
    let again = parse(&built, built.len() as u64 + data_bytes).expect("we refuse what we wrote");
    let relative = |header: &Header| {
        let mut header = header.clone();
        for tensor in &mut header.tensors {
            tensor.begin -= header.data_start;
            tensor.end -= header.data_start;
        }
        Header { data_start: 0, ..header }
    };
    assert_eq!(relative(&again), relative(header));
}
