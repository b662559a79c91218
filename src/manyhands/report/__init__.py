"""Shows a run: reads run folders only, and never imports torch."""
