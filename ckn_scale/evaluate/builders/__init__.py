"""Sets with ground truth from a reconstruction, as the paper made RomePatches from Rome16K."""
