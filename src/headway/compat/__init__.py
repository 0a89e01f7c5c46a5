"""Other spellings of training, thin over Headway's own trainer."""
