"""Update rules that are imported if --optimizer or another flag requests them."""
