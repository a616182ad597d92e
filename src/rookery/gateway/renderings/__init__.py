"""Chat formats: how messages become token ids and sampled ids become messages again."""
