//! All formats, in one program: to link one for every file takes longer than to run them.
#![allow(clippy::unwrap_used)]

mod arrangements;
mod hostile_headers;
mod hostile_indexes;
mod hostile_sums;
mod plans;
mod safetensors_oracle;
mod slots;
mod table_support;
mod tables;
